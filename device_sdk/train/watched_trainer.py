"""A Trainer that counts its steps, and that a measurement can stop between two of them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from device_sdk.system.clock import Clock
from device_sdk.trainer import Trainer

__all__ = ["OutOfTime", "WatchedTrainer"]


class OutOfTime(Exception):
    """A measurement's time was over before the round's work was."""


class WatchedTrainer(Trainer):
    """``steps`` counts since it was last set; ``stop_at`` is in the clock's seconds."""

    def __init__(self, directory: str | os.PathLike[str], clock: Clock, *, seed: int) -> None:
        super().__init__(directory, threads=1, seed=seed)
        self._clock = clock
        self.steps = 0
        self.stop_at = math.inf

    def step(
        self, batch: Mapping[str, NDArray[Any]], *, hyper: Mapping[str, float] | None = None
    ) -> float:
        """As :meth:`device_sdk.trainer.Trainer.step`; raises :class:`OutOfTime` when it is over."""
        if self._clock.now() >= self.stop_at:
            raise OutOfTime
        loss = super().step(batch, hyper=hyper)
        self.steps += 1
        return loss
