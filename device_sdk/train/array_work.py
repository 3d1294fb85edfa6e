"""The very work of a round with one artifact, to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from device_sdk.methods.learner import FetchingLearner, Learner
from device_sdk.system.clock import Clock
from device_sdk.train.artifact_choice import WorkDone
from device_sdk.train.placement import PlacedLearner
from device_sdk.train.watched_trainer import OutOfTime, WatchedTrainer
from device_sdk.wire.arrays.exchange import Broadcast

__all__ = ["ArrayWork"]


class ArrayWork:
    """A round on a learner that is thrown away; see
    :class:`~device_sdk.train.artifact_choice.RoundWork`.

    ``make`` gives the learner as the round would begin with it. ``mixes``: time a round with a
    mixture of the device's own, even where this one has none.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], tuple[Learner, WatchedTrainer]],
        broadcast: Broadcast,
        clock: Clock,
        *,
        mixes: bool = False,
    ) -> None:
        self.name = name
        self._make = make
        self._broadcast = broadcast
        self._clock = clock
        self._mixes = mixes

    def run(self, most_seconds: float) -> WorkDone:
        """See :class:`~device_sdk.train.artifact_choice.RoundWork`."""
        learner, trainer = self._make()
        trainer.steps = 0
        start = self._clock.now()
        trainer.stop_at = start + most_seconds
        try:
            if self._mixes and isinstance(learner, PlacedLearner):
                learner.rehearse(self._broadcast)
            else:
                learner.train(_readable(self._broadcast, learner))
        except OutOfTime:
            finished = False
        else:
            finished = True
        finally:
            trainer.stop_at = float("inf")
        return WorkDone(self._clock.now() - start, trainer.steps, finished)


def _readable(broadcast: Broadcast, learner: Learner) -> Broadcast:
    """The broadcast with those attachments only that this learner asked for."""
    if not isinstance(learner, FetchingLearner):
        return broadcast
    wanted = set(learner.wants(broadcast))
    kept = {name: each for name, each in broadcast.attachments.items() if name in wanted}
    return replace(broadcast, attachments=kept)
