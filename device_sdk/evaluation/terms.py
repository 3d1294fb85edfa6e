"""What a task asks its devices to find out, as a broadcast's terms carry it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from device_sdk.fields import Within, require_declared
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Record, read_name, require_name

MOST_METRICS = 16
FIELDS = ("every_rounds", "least_samples", "metrics", "share", "time_share")


@dataclass(frozen=True, slots=True)
class EvaluationTerms:
    """Which devices evaluate when, what, and at which cost.

    Attributes:
        metrics: names out of ``metrics.METRICS``, 1 to 16. One that a device does not know it
            leaves out and says so: the aggregator may be of a newer version.
        every_rounds: in rounds whose number is a multiple of this.
        share: of the devices that train in such a round, about this share evaluates.
        least_samples: a device that holds fewer back reports none. With scatter each user holds
            one back.
        time_share: an evaluation takes no longer than this share of the terms' ``train_seconds``,
            both stages together: beyond it a device goes by a sample of what it holds back.

    Raises ValueError, naming the field.
    """

    metrics: tuple[str, ...]
    every_rounds: Annotated[int, Within(1, 1_000_000)] = 1
    share: Annotated[float, Within(0, 1, above=True)] = 1.0
    least_samples: Annotated[int, Within(1, 1_000_000)] = 1
    time_share: Annotated[float, Within(0, 1, above=True)] = 0.25

    def __post_init__(self) -> None:
        require_declared(self)
        if not 1 <= len(self.metrics) <= MOST_METRICS:
            raise ValueError(f"{len(self.metrics)} metrics; expected 1 to {MOST_METRICS}")
        if len(set(self.metrics)) != len(self.metrics):
            raise ValueError("metrics names one of them twice")
        for name in self.metrics:
            require_name("metric", name)

    @property
    def threshold(self) -> int:
        """What a device's draw must be below (``manifest.evaluates``)."""
        return round(self.share * 2**64)

    def to_fields(self) -> dict[str, cbor.CborValue]:
        """The terms as CBOR values."""
        return {
            "every_rounds": self.every_rounds,
            "least_samples": self.least_samples,
            "metrics": list(self.metrics),
            "share": float(self.share),
            "time_share": float(self.time_share),
        }

    @classmethod
    def from_value(cls, value: cbor.CborValue) -> EvaluationTerms:
        """The inverse. Raises ``WireError``: ``bad-field``, ``wrong-fields``, ``bad-name``."""
        record = Record(value, FIELDS)
        named = record.array("metrics", MOST_METRICS)
        texts = tuple(each for each in named if isinstance(each, str))
        if len(texts) != len(named):
            raise WireError("bad-field", "each metric must be a text")
        try:
            return cls(
                tuple(read_name("metric", text.encode()) for text in texts),
                record.integer("every_rounds"),
                record.number("share"),
                record.integer("least_samples"),
                record.number("time_share"),
            )
        except ValueError as error:
            raise WireError("bad-field", f"the evaluation is not usable: {error}") from error
