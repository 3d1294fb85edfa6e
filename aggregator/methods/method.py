"""The aggregator's half of a federated method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from device_sdk.methods.state import State
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.codec.errors import WireError


class Refused(WireError):
    """An update that the method will not take. ``reason`` is a slug, as for any refusal."""

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str]]:
        return (Refused, (self.reason, str(self.args[0])))


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """How a round ended: ``version`` is the one to publish next, ``metrics`` are for people."""

    round_id: int
    version: int
    participants: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class Method(ABC):
    """Aggregates one round after another. Pure arithmetic: no I/O, no clock, no randomness.

    Order of calls: ``open_round``, then any number of ``check`` and ``absorb``, then
    ``close_round``. A round without quorum is given up by opening the next one; what was absorbed
    is forgotten and the version stays.
    """

    @abstractmethod
    def open_round(self, round_id: int) -> Broadcast:
        """Forget what was absorbed and open ``round_id``, which must be above the last one."""

    @abstractmethod
    def check(self, update: Update) -> None:
        """Raise :class:`Refused` unless ``absorb`` will take this update.

        Pure and total: changes nothing, and raises nothing but ``Refused`` whatever the arrays
        hold. Runs before the update is committed to disk.
        """

    @abstractmethod
    def absorb(self, update: Update) -> None:
        """Add a checked update. The same updates in the same order give the same bits."""

    @abstractmethod
    def close_round(self) -> RoundSummary:
        """Make the next version out of what was absorbed; without updates the version stays."""

    @abstractmethod
    def state(self) -> State:
        """Everything, the open round's sums included, as named arrays (copies)."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Continue, bit for bit, where ``state()`` was taken. Raises
        :class:`~device_sdk.methods.state.RestoreError`, and changes nothing, where it does not fit.
        """

    def forget(self, sender: str) -> None:  # noqa: B027
        """Drop what is kept of a device, where it is known: it was revoked. Between rounds.

        Here: nothing. For methods that hand on what single devices sent in earlier rounds.
        """
