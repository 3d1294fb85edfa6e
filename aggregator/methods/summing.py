"""A method whose rounds are sums, made on one shard or on several."""

from __future__ import annotations

from typing import Any, ClassVar

from numpy.typing import NDArray

from aggregator.methods.method import Method
from aggregator.methods.robust import RobustRule
from aggregator.methods.sums import MOST_UPDATES, Additive, RefusedShare
from device_sdk.methods.state import RestoreError, State


class SummingMethod(Additive, Method):
    """A method most of whose rounds add up. ``COUNTED``: the one of ``ADDED`` that counts a round's
    updates."""

    COUNTED: ClassVar[str]
    # By limits of their own: those that a sum of integers takes its scale from.
    bounds = None
    _rule: RobustRule
    _adds_up = 0

    @property
    def adds_up(self) -> bool:
        """See :class:`~aggregator.methods.method.Method`."""
        return bool(self._adds_up)

    def share(self) -> dict[str, NDArray[Any]]:
        """See :class:`~aggregator.methods.method.Method`; most of it is the sum itself."""
        self._require_adding_up()
        return super().share()

    def merge(self, share: State) -> None:
        """See :class:`~aggregator.methods.method.Method`."""
        self._require_adding_up()
        super().merge(share)

    def _require_adding_up(self) -> None:
        if not self._adds_up:
            raise TypeError(f"round {self._round_id} does not add up: its updates are held")

    def _require_sound(self) -> None:
        if self._adds_up and self._rule.holds:
            raise RestoreError(
                "the state is of a round that was opened with another 'robust': set it back until "
                "that round is closed"
            )

    def _read(self, share: State) -> dict[str, Any]:
        found = super()._read(share)
        if getattr(self, f"_{self.COUNTED}") + int(found[self.COUNTED]) > MOST_UPDATES:
            raise RefusedShare(f"a round of more than {MOST_UPDATES} updates could overflow")
        return found
