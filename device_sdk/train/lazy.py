"""The trainer of a task's method, loaded when the first round needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from device_sdk.methods.learner import Declined, Learner
from device_sdk.methods.registry import LEARNERS, MethodError, load_method
from device_sdk.train.job import RoundTrainer, TrainedRound, TrainingJob
from device_sdk.world import DeviceWorld


def learner_class(method: str) -> type[Learner] | type[RoundTrainer]:
    """What the installed package that offers the method trains with.

    A :class:`Learner` trains on the app's arrays. A :class:`RoundTrainer` has its own way with the
    home's data, as scatter's has. Raises :class:`Declined` where there is no such method.
    """
    try:
        found: type[Learner] | type[RoundTrainer]
        found = load_method(LEARNERS, method, Learner, RoundTrainer)
    except MethodError as error:
        raise Declined(f"this device has no learner for the method {method!r}: {error}") from error
    return found


def needs_receipts(method: str) -> bool:
    """Whether the method's learner must know of each update whether it was counted."""
    try:
        return learner_class(method).needs_receipts
    except Declined:
        return False  # its training will say so


class LazyTrainer(RoundTrainer):
    """Picks the trainer that the task's terms name.

    onnxruntime takes 20 MB and a tenth of a second: an app that only records and recommends never
    loads it.
    """

    def __init__(self, world: DeviceWorld) -> None:
        super().__init__(world)
        self._loaded: dict[str, RoundTrainer] = {}

    def train(self, job: TrainingJob) -> TrainedRound:
        """See :class:`~device_sdk.train.job.RoundTrainer`."""
        return self._of(job).train(job)

    def wants(self, job: TrainingJob) -> Sequence[str]:
        """See :class:`~device_sdk.train.job.RoundTrainer`."""
        return self._of(job).wants(job)

    def adopt(self, job: TrainingJob) -> Mapping[str, NDArray[Any]] | None:
        """See :class:`~device_sdk.train.job.RoundTrainer`."""
        return self._of(job).adopt(job)

    def _of(self, job: TrainingJob) -> RoundTrainer:
        method = job.terms.method
        if method not in self._loaded:
            self._loaded[method] = self._load(method)
        return self._loaded[method]

    def _load(self, method: str) -> RoundTrainer:
        found = learner_class(method)
        if issubclass(found, RoundTrainer):
            return found(self._world)

        from device_sdk.train.arrays import ArrayTrainer

        return ArrayTrainer(self._world, found)
