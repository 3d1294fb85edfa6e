"""The device's half of a federated method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np

from device_sdk.methods.state import State as State
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.publish.report import ItemCount, Reason

if TYPE_CHECKING:
    # It loads onnxruntime, which an app that only records and recommends never needs.
    from device_sdk.local_data import DataSource
    from device_sdk.trainer import Trainer

Where = Literal["device", "aggregator"]


class LearnerError(ValueError):
    """A broadcast, a state or local data does not fit the learner; the message says how.

    The learner is as it was before the call. The device skips the round: its owner is told the
    message, the aggregator's operator ``reason`` alone.
    """

    def __init__(self, message: str, reason: Reason = Reason.DOES_NOT_FIT) -> None:
        super().__init__(message)
        self.reason = reason


def lacks(where: str, what: str) -> LearnerError:
    """The error of a broadcast, or of another thing that the method's other half has made, that is
    without an array that this half begins with: the two are not of one release."""
    return LearnerError(
        f"{where} lacks {what}: device and aggregator are of different releases, update the older"
    )


class Declined(Exception):
    """The device takes no part in this round; the message says why, to its owner, and ``reason`` to
    the aggregator's operator."""

    def __init__(
        self, message: str, reason: Reason = Reason.NOT_NOW, items: ItemCount | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.items = items
        """What the device knows of the task's catalogue; None for what has none to do with it."""


@dataclass(frozen=True, slots=True)
class LearnerParts:
    """What a device has for a learner.

    Attributes:
        data: the app's samples, to be asked for at the start of each round.
        trainer: of the artifact that this device trains, at the artifact's own parameters.
        companion: of the artifact that belongs to it, if the task has such (attention's
            meta-network).
        sender: the device's name among the task's, 32 hexadecimal digits.
        rng: for every draw.
        placement: who does the work that either end may do; ``auto`` before that was measured.
    """

    data: DataSource
    trainer: Trainer
    companion: Trainer | None
    sender: str
    rng: np.random.Generator
    placement: Where | Literal["auto"] = "auto"


@dataclass(frozen=True, slots=True)
class MovableWork:
    """Work that a device does itself where it can, and the aggregator where it cannot.

    Attributes:
        size: what its time grows with.
        download_bytes: of the attachments that it takes.
        here, there: for people, after "This device" and "The aggregator": who does it.
        with_it: for people, what a round here then is.
        fetched: for people, what the attachments hold.
        obstacle: why this device cannot do it, whatever the time it has; empty where it can.
    """

    size: int
    download_bytes: int
    here: str = "does it itself"
    there: str = "does it"
    with_it: str = "with it"
    fetched: str = "its attachments"
    obstacle: str = ""


class Learner(ABC):
    """Turns one broadcast and the device's own data into one update.

    ``train`` changes the learner's private state (its users' vectors, say). Whoever runs a learner
    commits ``state()`` and the update together, so that a crash between the two cannot leave one
    without the other. A device makes its learner anew for each round and gives it the last state
    that was committed. A method overrides what it needs; ``train`` alone has no default.
    """

    needs_receipts: ClassVar[bool] = False
    """Begin no round while an update waits for its verdict, which :meth:`receipt` is told."""

    has_movable_work: ClassVar[bool] = False
    """:meth:`movable_work` is worth asking."""

    rehearses: ClassVar[bool] = False
    """:meth:`rehearse` does a round's work without attachments: a device chooses among artifacts
    before it fetches anything for one."""

    @classmethod
    def make(cls, parts: LearnerParts) -> Self:
        """A new learner. Here: with data, trainer, sender and rng as its arguments.

        Raises ValueError where the artifact is not of the method's kind, :class:`Declined` where
        this device cannot take part.
        """
        return cls(parts.data, parts.trainer, parts.sender, parts.rng)  # type: ignore[call-arg]

    @abstractmethod
    def train(self, broadcast: Broadcast) -> Update:
        """Train for one round; raises LearnerError, and then the state is unchanged."""

    @classmethod
    def train_many(
        cls, learners: Sequence[Self], broadcast: Broadcast
    ) -> Sequence[Update | LearnerError]:
        """:meth:`train` of many devices' learners in one process, each as if it were alone.

        For whoever simulates a fleet. One entry for each learner, in their order: its update, or
        why it could not train, and then it is unchanged. Every learner draws from its own generator
        what :meth:`train` draws. Here: one after another.
        """
        found: list[Update | LearnerError] = []
        for learner in learners:
            try:
                found.append(learner.train(broadcast))
            except LearnerError as error:
                found.append(error)
        return found

    def state(self) -> State:
        """Everything that must survive a restart, as named arrays (copies). Here: nothing."""
        return {}

    def restore(self, state: State) -> None:
        """Take a ``state()`` back; raises LearnerError if it does not fit."""
        if state:
            raise LearnerError(f"the state holds {sorted(state)}; this learner keeps none")

    def carries_over(self, broadcast: Broadcast) -> bool:
        """Whether the next round's training depends on the ``state()`` that this one leaves.

        Where it does not, whoever simulates a fleet keeps none. Here: yes.
        """
        return True

    def wants(self, broadcast: Broadcast) -> Sequence[str]:
        """Names out of ``broadcast.offered`` that ``train`` must find in ``attachments``.

        Changes nothing. Raises LearnerError as ``train`` does. Here: none.
        """
        return ()

    def receipt(self, round_id: int, *, counted: bool) -> None:  # noqa: B027
        """The aggregator's verdict on this learner's update for ``round_id``. Here: no matter.

        Called before the next ``train``, once or more often; what is unknown or old is ignored.
        With ``needs_receipts`` a device begins no round while an update of it waits for its
        verdict; where there is none all the same, the update is taken for not counted.
        """

    def adopt(self, broadcast: Broadcast) -> bool:
        """Make the trainer's model the broadcast's, without training; False where none is shared.

        Called with the task's last broadcast, when its rounds are over. Raises LearnerError as
        ``train`` does.
        """
        return False

    def receive(self, broadcast: Broadcast) -> bool:
        """Make the trainer's model the one that the broadcast shares, to be evaluated before the
        training; False where the method shares none. Here: as :meth:`adopt`.

        Called on a learner that is then thrown away. Raises LearnerError as ``train`` does.
        """
        return self.adopt(broadcast)

    def personalises(self, broadcast: Broadcast) -> bool:
        """Whether the device's model after its training is evaluated too. Here: yes, for that is
        what ``Device.predict`` uses, whatever becomes of it at the aggregator."""
        return True

    def wants_alone(self, broadcast: Broadcast) -> Sequence[str]:
        """As :meth:`wants`, for :meth:`train_alone` that begins. Here: none."""
        return ()

    def train_alone(self, broadcast: Broadcast, *, begins: bool) -> None:
        """A round's steps from the model that the trainer holds, with nothing of the broadcast but
        its settings: the control arm's round.

        Called on a learner that is then thrown away; what the trainer then holds is kept.
        ``begins``: it holds the artifact's own values. Raises LearnerError as ``train`` does. Here:
        always, for a method whose steps are nothing by themselves.
        """
        raise LearnerError("the method has no steps that a device could take alone")

    def movable_work(self, broadcast: Broadcast) -> MovableWork | None:
        """What either end may do in this round or a later one; None where there is none.

        Raises LearnerError as ``train`` does.
        """
        return None

    def rehearse(self, broadcast: Broadcast) -> None:
        """A round, to be timed, on a learner that is thrown away: with the movable work done here.

        Needs no attachments. Raises LearnerError as ``train`` does.
        """
        raise LearnerError("this learner cannot do a round's work without its attachments")
