"""A device's own choices about training, never the aggregator's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from device_sdk.learners.pool import PoolSettings

__all__ = ["TrainingOptions"]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How this device trains.

    Attributes:
        k: the number of columns to train; None measures what the device can afford.
        slowdown: emulates a device so many times slower, by sleeping; the status says so.
        capability_seconds: the longest that a measurement of k may take.
        when_none_fits: ``one`` trains one column even where that takes too long; ``decline`` sits
            such rounds out.
        pool: pseudo-items that are mixed in for privacy.

    Raises ValueError, naming the option.
    """

    k: int | None = None
    slowdown: float = 1.0
    capability_seconds: float = 5.0
    when_none_fits: Literal["one", "decline"] = "one"
    pool: PoolSettings = field(default_factory=PoolSettings)

    def __post_init__(self) -> None:
        if self.k is not None and (isinstance(self.k, bool) or self.k < 1):
            raise ValueError(f"k is {self.k!r}; expected 1 or more columns, or None to measure")
        if not (math.isfinite(self.slowdown) and self.slowdown >= 1.0):
            raise ValueError(f"slowdown is {self.slowdown}; expected a finite factor of 1 or more")
        if not (math.isfinite(self.capability_seconds) and self.capability_seconds > 0):
            raise ValueError(f"capability_seconds is {self.capability_seconds}; expected above 0")
        if self.when_none_fits not in ("one", "decline"):
            raise ValueError(
                f'when_none_fits is {self.when_none_fits!r}; expected "one" or "decline"'
            )
