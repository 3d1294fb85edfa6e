"""A device's own choices about training, never the aggregator's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from device_sdk.methods.scatter.triples import PoolSettings


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How this device trains.

    Attributes:
        k: the number of columns to train; None measures what the device can afford.
        slowdown: emulates a device so many times slower, by sleeping; the status says so.
        capability_seconds: the longest that a measurement of k may take.
        when_none_fits: ``one`` trains one column, or the smallest artifact, even where that takes
            too long; ``decline`` sits such rounds out.
        artifact: of a task that offers several, train this one: its name, or the first digits (8
            or more) of its id in hexadecimal. None measures what the device can afford.
        most_artifact_bytes: of a task that offers several, take no more than this for all of them
            together, smallest first.
        placement: with attention, where neighbours' parameters are mixed: ``device``, or
            ``aggregator`` for a device too weak to fetch them and to train the meta-network.
            ``auto`` measures: the device, where a round with its own mixture ends in time.
        most_attachment_bytes: with ``placement="auto"``, the most that neighbours' parameters may
            be; the aggregator mixes where they are more.
        pool: pseudo-items that are mixed in for privacy.
        most_outbox_updates, most_outbox_bytes: with so much waiting for receipts no further round
            is trained until some have come.

    Raises ValueError, naming the option.
    """

    k: int | None = None
    slowdown: float = 1.0
    capability_seconds: float = 5.0
    when_none_fits: Literal["one", "decline"] = "one"
    pool: PoolSettings = field(default_factory=PoolSettings)
    artifact: str | None = None
    most_artifact_bytes: int = 64 << 20
    placement: Literal["auto", "device", "aggregator"] = "auto"
    most_attachment_bytes: int = 64 << 20
    most_outbox_updates: int = 8
    most_outbox_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.k is not None and (isinstance(self.k, bool) or self.k < 1):
            raise ValueError(f"k is {self.k!r}; expected 1 or more columns, or None to measure")
        if not (math.isfinite(self.slowdown) and self.slowdown >= 1.0):
            raise ValueError(f"slowdown is {self.slowdown}; expected a finite factor of 1 or more")
        if not (math.isfinite(self.capability_seconds) and self.capability_seconds > 0):
            raise ValueError(f"capability_seconds is {self.capability_seconds}; expected above 0")
        if self.artifact is not None and not self.artifact:
            raise ValueError("artifact is empty; expected a name, or None to measure")
        for name in (
            "most_artifact_bytes",
            "most_attachment_bytes",
            "most_outbox_updates",
            "most_outbox_bytes",
        ):
            most = getattr(self, name)
            if isinstance(most, bool) or most < 1:
                raise ValueError(f"{name} is {most!r}; expected 1 or more")
        if self.placement not in ("auto", "device", "aggregator"):
            raise ValueError(
                f'placement is {self.placement!r}; expected "auto", "device" or "aggregator"'
            )
        if self.when_none_fits not in ("one", "decline"):
            raise ValueError(
                f'when_none_fits is {self.when_none_fits!r}; expected "one" or "decline"'
            )
