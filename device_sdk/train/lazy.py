"""The trainer of a task's method, loaded when the first round needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from device_sdk.train.job import (
    AdoptingTrainer,
    Declined,
    FetchingTrainer,
    RoundTrainer,
    TrainedRound,
    TrainingJob,
)
from device_sdk.world import DeviceWorld


class LazyTrainer:
    """Picks the trainer that the task's terms name.

    onnxruntime takes 20 MB and a tenth of a second: an app that only records and recommends never
    loads it.
    """

    def __init__(self, world: DeviceWorld) -> None:
        self._world = world
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
        if method == "scatter":
            from device_sdk.train.scatter import ScatterTrainer

            return ScatterTrainer(self._world)

        from device_sdk.train.arrays import ARRAY_LEARNERS, ArrayTrainer

        if method not in ARRAY_LEARNERS:
            raise Declined(f"this version of Tessera has no learner for the method {method!r}")
        return ArrayTrainer(self._world, ARRAY_LEARNERS[method])
