"""The trainer of a task's method, loaded when the first round needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.home.home import Home
from device_sdk.methods.learner import Declined, Learner
from device_sdk.methods.registry import LEARNERS, MethodError, load_method
from device_sdk.system.clock import Clock, MonotonicClock
from device_sdk.train.job import RoundTrainer, TrainedRound, TrainingJob
from device_sdk.train.options import TrainingOptions

if TYPE_CHECKING:
    from device_sdk.local_data import DataSource


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
        super().__init__(home, options, clock=clock or MonotonicClock(), rng=rng)
        self._source = source
        self._sender = sender
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
            return found(self._home, self._options, clock=self._clock, rng=self._rng)

        from device_sdk.train.arrays import ArrayTrainer

        return ArrayTrainer(
            self._home,
            self._source,
            found,
            self._sender,
            self._options,
            clock=self._clock,
            rng=self._rng,
        )
