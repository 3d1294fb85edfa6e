"""The device's half of a federated method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from device_sdk.wire.arrays.exchange import Broadcast, Update

State = Mapping[str, NDArray[Any]]


class LearnerError(ValueError):
    """A broadcast, a state or local data does not fit the learner; the message says how.

    The learner is as it was before the call. The device skips the round and reports the message.
    """


class Learner(Protocol):
    """Turns one broadcast and the device's own data into one update.

    ``train`` changes the learner's private state (its users' vectors, say). Whoever runs a learner
    commits ``state()`` and the update together, so that a crash between the two cannot leave one
    without the other.
    """

    def train(self, broadcast: Broadcast) -> Update:
        """Train for one round; raises LearnerError, and then the state is unchanged."""

    def state(self) -> State:
        """Everything that must survive a restart, as named arrays (copies)."""

    def restore(self, state: State) -> None:
        """Take a ``state()`` back; raises LearnerError if it does not fit."""


@runtime_checkable
class FetchingLearner(Protocol):
    """A learner that needs some of a broadcast's attachments."""

    def wants(self, broadcast: Broadcast) -> Sequence[str]:
        """Names out of ``broadcast.offered`` that ``train`` must find in ``attachments``.

        Changes nothing. Raises LearnerError as ``train`` does.
        """


@runtime_checkable
class ReceiptLearner(Protocol):
    """A learner that must know whether its last updates were counted."""

    def receipt(self, round_id: int, *, counted: bool) -> None:
        """The aggregator's verdict on this learner's update for ``round_id``.

        Called before the next ``train``, once or more often; what is unknown or old is ignored.
        A device begins no round while an update of it waits for its verdict; where there is none
        all the same, the update is taken for not counted.
        """


@runtime_checkable
class AdoptingLearner(Protocol):
    """A learner that can take over what all made, without training."""

    def adopt(self, broadcast: Broadcast) -> None:
        """Make the trainer's model the broadcast's. Raises LearnerError as ``train`` does.

        Called with the task's last broadcast, when its rounds are over.
        """
