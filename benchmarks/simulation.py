"""Rounds of a federated method over virtual devices, one after another in this process: a method's
two halves, and nothing of the task around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import Method, Refused, RoundSummary
from aggregator.simulate.data import Rows
from aggregator.simulate.devices import (
    FixedInteractions,
    groups,
    most_in_a_group,
    train_many,
    with_wanted,
)
from device_sdk.methods.learner import Learner, LearnerError
from device_sdk.methods.scatter.factor_step import FactorStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from device_sdk.wire.arrays.tensors import BeyondWire


class Channel(Protocol):
    """Carries messages, as exactly as its encoding does. May count what it carries."""

    def down(self, broadcast: Broadcast) -> Broadcast:
        """What every device of the round receives."""

    def fetch(self, device: int, attachment: Attachment) -> Attachment:
        """What a device that asked for an attachment receives."""

    def up(self, update: Update) -> Update:
        """What the aggregator receives."""


class DirectChannel:
    """Hands everything over as it is; what others change of it, they say."""

    def down(self, broadcast: Broadcast) -> Broadcast:
        """The broadcast itself."""
        return broadcast

    def fetch(self, device: int, attachment: Attachment) -> Attachment:
        """The attachment itself."""
        return attachment

    def up(self, update: Update) -> Update:
        """The update itself."""
        return update


def device_name(index: int) -> str:
    """What stands for a device's id: its index in 32 hexadecimal digits."""
    return f"{index:032x}"


class Simulation:
    """Runs a method's two halves as the aggregator and the fleet would, updates streamed.

    The order of absorption is that of the participants, so a run whose generators were seeded is
    repeatable bit for bit. At any time the updates of one group of devices are in memory, not a
    round of them. A device that fails, or whose update is refused, is counted and the round goes on
    without it.

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
        # What is attached is for single devices: they then train one by one.
        most = 1 if opened.attachments else most_in_a_group(broadcast)
        for group in groups(chosen, most):
            for device, found in zip(group, self._trained(group, broadcast, opened), strict=True):
                try:
                    if isinstance(found, LearnerError):
                        raise found
                    update = replace(self._channel.up(found), sender=self._names[device])
                    self.method.check(update)
                except (LearnerError, Refused, BeyondWire) as error:
                    self._count(error)
                    continue
                self.method.absorb(update)
                self.learners[device].receipt(update.round_id, counted=True)
        return self.method.close_round()

    def epoch(
        self,
        cohort: int,
        always: Sequence[int] = (),
        among: NDArray[np.int64] | None = None,
    ) -> Iterator[RoundSummary]:
        """All devices once, or those ``among`` them, in random order, ``cohort`` of them in each
        round (the last: fewer); those of ``always`` in every round, and first."""
        if cohort < 1:
            raise ValueError(f"a cohort of {cohort} devices cannot hold a round")
        order = self._rng.permutation(len(self.learners) if among is None else among)
        for start in range(0, len(order), cohort):
            others = [one for one in order[start : start + cohort].tolist() if one not in always]
            yield self.round((*always, *others))

    def _trained(
        self, group: Sequence[int], broadcast: Broadcast, opened: Broadcast
    ) -> Sequence[Update | LearnerError]:
        learners = [self.learners[device] for device in group]
        if opened.attachments:
            (device,), (learner,) = group, learners
            fetch = partial(self._channel.fetch, device)
            try:
                broadcast = with_wanted(broadcast, opened, self._names[device], learner, fetch)
            except LearnerError as error:
                return [error]
        return train_many(learners, broadcast)

    def _count(self, error: LearnerError | Refused | BeyondWire) -> None:
        reason = error.reason if isinstance(error, Refused) else "learner"
        self.failures[reason] = self.failures.get(reason, 0) + 1


def mixed_columns(
    devices: int, classes: Sequence[int], rng: np.random.Generator
) -> NDArray[np.int64]:
    """k_i of each device: the classes in equal shares, dealt at random."""
    dealt = np.arange(devices, dtype=np.int64) % len(classes)
    columns: NDArray[np.int64] = np.asarray(classes, dtype=np.int64)[rng.permutation(dealt)]
    return columns


def scatter_fleet(
    positives: Sequence[Sequence[Rows]],
    columns: Sequence[int] | NDArray[np.int64],
    step: FactorStep,
    seeds: np.random.SeedSequence,
    pool: PoolSettings | None = None,
) -> list[ScatterLearner]:
    """One learner a device, each with a generator of its own, all sharing one ``step``.

    Args:
        positives: for each device, for each of its users, the item rows of its interactions.
        columns: k_i of each device.
        step: computes gradients; one session serves the whole process.
        seeds: parent of the devices' seeds.
        pool: the devices' privacy settings.

    Raises ValueError when ``positives`` and ``columns`` differ in length.
    """
    children = seeds.spawn(len(positives))
    return [
        ScatterLearner(
            FixedInteractions(users), step, int(count), np.random.default_rng(child), pool
        )
        for users, count, child in zip(positives, columns, children, strict=True)
    ]
