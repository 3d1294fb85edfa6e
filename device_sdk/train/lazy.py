"""The trainer of a task's method, loaded when the first round needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.home.home import Home
from device_sdk.train.job import (
    AdoptingTrainer,
    Declined,
    FetchingTrainer,
    RoundTrainer,
    TrainedRound,
    TrainingJob,
)
from device_sdk.train.options import TrainingOptions

if TYPE_CHECKING:
    from device_sdk.local_data import DataSource
    from device_sdk.system.clock import Clock


class LazyTrainer:
    """Picks the trainer that the task's terms name.

    onnxruntime takes 20 MB and a tenth of a second: an app that only records and recommends never
    loads it. ``clock`` times the training; None for the machine's own. ``source`` gives the app's
    data source, for methods that train on arrays; ``sender`` is the device's id in hexadecimal.
    """

    def __init__(
        self,
        home: Home,
        options: TrainingOptions,
        *,
        source: Callable[[], DataSource | None],
        sender: str,
        clock: Clock | None,
        rng: np.random.Generator,
    ) -> None:
        self._home = home
        self._options = options
        self._source = source
        self._sender = sender
        self._clock = clock
        self._rng = rng
        self._loaded: dict[str, RoundTrainer] = {}

    def train(self, job: TrainingJob) -> TrainedRound:
        """See :class:`~device_sdk.train.job.RoundTrainer`."""
        return self._of(job).train(job)

    def wants(self, job: TrainingJob) -> Sequence[str]:
        """See :class:`~device_sdk.train.job.FetchingTrainer`."""
        trainer = self._of(job)
        return trainer.wants(job) if isinstance(trainer, FetchingTrainer) else ()

    def adopt(self, job: TrainingJob) -> Mapping[str, NDArray[Any]] | None:
        """See :class:`~device_sdk.train.job.AdoptingTrainer`."""
        trainer = self._of(job)
        return trainer.adopt(job) if isinstance(trainer, AdoptingTrainer) else None

    def _of(self, job: TrainingJob) -> RoundTrainer:
        method = job.terms.method
        if method not in self._loaded:
            self._loaded[method] = self._load(method)
        return self._loaded[method]

    def _load(self, method: str) -> RoundTrainer:
        from device_sdk.system.clock import MonotonicClock

        clock = self._clock if self._clock is not None else MonotonicClock()
        if method == "scatter":
            from device_sdk.train.scatter import ScatterTrainer

            return ScatterTrainer(self._home, self._options, clock=clock, rng=self._rng)

        from device_sdk.train.arrays import ARRAY_LEARNERS, ArrayTrainer

        if method not in ARRAY_LEARNERS:
            raise Declined(f"this version of Tessera has no learner for the method {method!r}")
        return ArrayTrainer(
            self._home,
            self._source,
            ARRAY_LEARNERS[method],
            self._sender,
            self._options,
            clock=clock,
            rng=self._rng,
        )
