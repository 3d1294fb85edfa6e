"""Rounds of a federated method over virtual devices, one after another in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from aggregator.methods.method import Method, Refused, RoundSummary
from benchmarks.simulator.channel import Channel, DirectChannel
from device_sdk.learners.learner import Learner, LearnerError

__all__ = ["Simulation"]


class Simulation:
    """Runs a method's two halves as the aggregator and the fleet would, updates streamed.

    The order of absorption is that of the participants, so a run whose generators were seeded is
    repeatable bit for bit. At any time one update is in memory, not a round of them. A device that
    fails, or whose update is refused, is counted and the round goes on without it.

    Args:
        method: the aggregator's half.
        learners: the devices' halves, one a device.
        rng: source of the cohorts.
        channel: what updates and broadcasts pass through.
    """

    def __init__(
        self,
        method: Method,
        learners: Sequence[Learner],
        rng: np.random.Generator,
        channel: Channel | None = None,
    ) -> None:
        self.method = method
        self.learners = learners
        self._rng = rng
        self._channel: Channel = channel if channel is not None else DirectChannel()
        self._round_id = 0
        self.failures: dict[str, int] = {}

    @property
    def rounds(self) -> int:
        """The number of rounds opened so far."""
        return self._round_id

    def round(self, participants: Iterable[int] | None = None) -> RoundSummary:
        """One round with these devices (indices into ``learners``), by default with all."""
        self._round_id += 1
        broadcast = self._channel.down(self.method.open_round(self._round_id))
        chosen = range(len(self.learners)) if participants is None else participants
        for device in chosen:
            try:
                update = self._channel.up(self.learners[device].train(broadcast))
                self.method.check(update)
            except (LearnerError, Refused) as error:
                self._count(error)
                continue
            self.method.absorb(update)
        return self.method.close_round()

    def epoch(self, cohort: int) -> Iterator[RoundSummary]:
        """All devices once, in random order, ``cohort`` of them in each round (the last: fewer)."""
        if cohort < 1:
            raise ValueError(f"a cohort of {cohort} devices cannot hold a round")
        order = self._rng.permutation(len(self.learners))
        for start in range(0, len(order), cohort):
            yield self.round(int(device) for device in order[start : start + cohort])

    def _count(self, error: LearnerError | Refused) -> None:
        reason = error.reason if isinstance(error, Refused) else "learner"
        self.failures[reason] = self.failures.get(reason, 0) + 1
