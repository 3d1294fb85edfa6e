"""The learner of a task's method, loaded when the first round needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from device_sdk.home.home import Home
from device_sdk.rounds.job import Declined, RoundTrainer, TrainedRound, TrainingJob
from device_sdk.rounds.options import TrainingOptions

if TYPE_CHECKING:
    from device_sdk.capability.clock import Clock

__all__ = ["LazyTrainer"]


class LazyTrainer:
    """Picks the learner that the task's terms name.

    onnxruntime takes 20 MB and a tenth of a second: an app that only records and recommends never
    loads it. ``clock`` times the training; None for the machine's own.
    """

    def __init__(
        self, home: Home, options: TrainingOptions, *, clock: Clock | None, rng: np.random.Generator
    ) -> None:
        self._home = home
        self._options = options
        self._clock = clock
        self._rng = rng
        self._loaded: dict[str, RoundTrainer] = {}

    def train(self, job: TrainingJob) -> TrainedRound:
        """See :class:`~device_sdk.rounds.job.RoundTrainer`."""
        method = job.terms.method
        if method not in self._loaded:
            self._loaded[method] = self._load(method)
        return self._loaded[method].train(job)

    def _load(self, method: str) -> RoundTrainer:
        if method != "scatter":
            raise Declined(f"this version of Tessera has no learner for the method {method!r}")
        from device_sdk.capability.clock import MonotonicClock
        from device_sdk.rounds.scatter_trainer import ScatterTrainer

        clock = self._clock if self._clock is not None else MonotonicClock()
        return ScatterTrainer(self._home, self._options, clock=clock, rng=self._rng)
