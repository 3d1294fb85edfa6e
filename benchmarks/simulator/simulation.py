"""Rounds of a federated method over virtual devices, one after another in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from aggregator.methods.method import Method, Refused, RoundSummary
from benchmarks.simulator.channel import Channel, DirectChannel
from device_sdk.methods.learner import Learner, LearnerError
from device_sdk.wire.arrays.exchange import Broadcast


def device_name(index: int) -> str:
    """What stands for a device's id: its index in 32 hexadecimal digits."""
    return f"{index:032x}"


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
        names: what the devices are called; by default :func:`device_name`.
    """

    def __init__(
        self,
        method: Method,
        learners: Sequence[Learner],
        rng: np.random.Generator,
        channel: Channel | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.method = method
        self.learners = learners
        self._rng = rng
        self._channel: Channel = channel if channel is not None else DirectChannel()
        self._names = names or [device_name(index) for index in range(len(learners))]
        self._round_id = 0
        self.failures: dict[str, int] = {}

    @property
    def rounds(self) -> int:
        """The number of rounds opened so far."""
        return self._round_id

    def round(self, participants: Iterable[int] | None = None) -> RoundSummary:
        """One round with these devices (indices into ``learners``), by default with all."""
        self._round_id += 1
        opened = self.method.open_round(self._round_id)
        broadcast = self._channel.down(replace(opened, attachments={}, cohorts={}))
        chosen = range(len(self.learners)) if participants is None else participants
        for device in chosen:
            try:
                received = self._fetch(device, broadcast, opened)
                update = self._channel.up(self.learners[device].train(received))
                update = replace(update, sender=self._names[device])
                self.method.check(update)
            except (LearnerError, Refused) as error:
                self._count(error)
                continue
            self.method.absorb(update)
            self.learners[device].receipt(update.round_id, counted=True)
        return self.method.close_round()

    def epoch(self, cohort: int, always: Sequence[int] = ()) -> Iterator[RoundSummary]:
        """All devices once, in random order, ``cohort`` of them in each round (the last: fewer);
        those of ``always`` in every round, and first."""
        if cohort < 1:
            raise ValueError(f"a cohort of {cohort} devices cannot hold a round")
        order = self._rng.permutation(len(self.learners))
        for start in range(0, len(order), cohort):
            others = [one for one in order[start : start + cohort].tolist() if one not in always]
            yield self.round((*always, *others))

    def _fetch(self, device: int, broadcast: Broadcast, opened: Broadcast) -> Broadcast:
        """The broadcast with those attachments that the device may read and wants."""
        learner = self.learners[device]
        if not opened.attachments:
            return broadcast
        name = self._names[device]
        readable = {
            key: attachment
            for key, attachment in opened.attachments.items()
            if not attachment.cohort or name in opened.cohorts[attachment.cohort]
        }
        sizes = {
            key: sum(array.nbytes for array in attachment.tensors.values())
            for key, attachment in readable.items()
        }
        offer = replace(broadcast, offered=sizes)
        wanted = {key: self._channel.fetch(device, readable[key]) for key in learner.wants(offer)}
        return replace(offer, attachments=wanted)

    def _count(self, error: LearnerError | Refused) -> None:
        reason = error.reason if isinstance(error, Refused) else "learner"
        self.failures[reason] = self.failures.get(reason, 0) + 1
