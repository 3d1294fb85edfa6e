"""What a task asks its devices to find out, as a broadcast's terms carry it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from device_sdk.fields import Declared, Length, Within
from device_sdk.wire.codec.message import Name

MOST_METRICS = 16


@dataclass(frozen=True, slots=True)
class EvaluationTerms(Declared):
    """Which devices evaluate when, what, and at which cost."""

    metrics: Annotated[tuple[Name, ...], Length(1, MOST_METRICS)]
    """Names out of ``metrics.METRICS``, each once. One that a device does not know it leaves out
    and says so: the aggregator may be of a newer version."""
    every_rounds: Annotated[int, Within(1, 1_000_000)] = 1
    """In rounds whose number is a multiple of this."""
    share: Annotated[float, Within(0, 1, above=True)] = 1.0
    """Of the devices that train in such a round, about this share evaluates."""
    least_samples: Annotated[int, Within(1, 1_000_000)] = 1
    """A device that holds fewer back reports none. With scatter each user holds one back."""
    time_share: Annotated[float, Within(0, 1, above=True)] = 0.25
    """An evaluation takes no longer than this share of the terms' ``train_seconds``, both stages
    together: beyond it a device goes by a sample of what it holds back."""

    def check(self) -> None:
        if len(set(self.metrics)) != len(self.metrics):
            raise ValueError("metrics names one of them twice")

    @property
    def threshold(self) -> int:
        """What a device's draw must be below (``manifest.evaluates``)."""
        return round(self.share * 2**64)
