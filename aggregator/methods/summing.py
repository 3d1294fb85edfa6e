"""Methods whose updates are matrices: bounded by the fleet's norms, weighed, summed as integers.

The sums' scale follows from the bounds, so a round adds up, over any shards to the same bits, once
the fleet is known and unless a ``robust`` rule needs all of a round's updates at once. What does
not add up is held, and judged by itself when the round closes: in a task's first round, and while
fewer than three devices were heard of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.bounds import Judged, NormBounding, Sized
from aggregator.methods.method import Method, NoVersion
from aggregator.methods.robust import RobustRule
from device_sdk.methods.state import COUNT, RestoreError, Schema
from device_sdk.wire.arrays.exchange import Update


class SummingMethod(Method):
    """A method most of whose rounds add up. It writes, in the place of ``add``, :meth:`sized`,
    :meth:`sum_up` and :meth:`sum_held`, and makes its sums in :meth:`begin_sums`."""

    # By limits of their own: those that a sum of integers takes its scale from.
    bounds = None
    SHARDS = True
    _bounding: NormBounding
    _rule: RobustRule
    _adds_up = 0

    # -- the formula -------------------------------------------------------------------------------

    @abstractmethod
    def sized(self, updates: Iterable[Update]) -> Iterator[list[Sized]]:
        """Decode checked updates, in groups that are summed together."""

    @abstractmethod
    def begin_sums(self) -> None:
        """The round adds up: make its sums, at a scale that the limits bound."""

    @abstractmethod
    def sum_up(self, judged: Sequence[Judged]) -> None:
        """Add a group of updates as they count."""

    @abstractmethod
    def sum_held(self, judged: Iterable[Judged], largest: float) -> None:
        """Likewise all of a round's, none of which is known to be larger than ``largest``, in sums
        that are made for them, or by the robust rule. ``judged`` is made as it is gone through."""

    def add(self, update: Update) -> None:
        """Decode, bound, weigh and sum one that was not held."""
        self._count([update])

    # -- the stages --------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        return self._rule.holds

    @property
    def _holds(self) -> bool:
        return not self._adds_up

    def begin(self, round_id: int) -> None:
        super().begin(round_id)
        self._adds_up = 0
        self._parts_follow()
        self.follow()

    def _open(self) -> None:
        if not (self._bounding.holds or self.keeps):
            self._adds_up = 1
            self.follow()
            self.begin_sums()

    def _schema(self) -> Schema:
        return {**super()._schema(), "adds_up": COUNT}

    def _require_sound(self) -> None:
        if self._adds_up and self.keeps:
            raise RestoreError(
                "the state is of a round that was opened with another 'robust': set it back until "
                "that round is closed"
            )
        self.follow()


def finite(what: str, moved: NDArray[Any]) -> NDArray[Any]:
    """The new version's numbers. Raises NoVersion where one is not finite."""
    if not np.isfinite(moved).all():
        raise NoVersion(
            f"the server's step made the {what} non-finite; lower the learning rate or set "
            "clip_norm"
        )
    return moved
