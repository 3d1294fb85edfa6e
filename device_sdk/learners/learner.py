"""The device's half of a federated method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from device_sdk.wire.exchange import Broadcast, Update

__all__ = ["Learner", "LearnerError", "State"]

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
