"""Updates of closed rounds that count in the open one: how old each is, and how it is read.

Its own round names an update everywhere: in the verdict, in the log, in the body's decoding. How
many versions ago that was follows from the rounds in the store, so that a restore, and another
worker, find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from aggregator.guard import GuardedBinding
from aggregator.store import TaskStore
from aggregator.store.rows import RoundRow
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.errors import WireError


class Sent(NamedTuple):
    """A body, who sent it, the round that it is of and, of a closed one, its age."""

    body: bytes
    device_id: bytes
    round: int
    age: int | None = None

    def aged(self, update: Update) -> Update:
        """The body's update, which says how old it is."""
        return update if self.age is None else replace(update, age=self.age)


class Ages:
    """Of what closed rounds sent, in a task's open round.

    Attributes:
        brought: devices that brought an update of another round into the open one. Where rounds
            enter as sums, of a process before this one nothing is known.
    """

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self._row: RoundRow | None = None
        self._known: dict[int, int | None] = {}
        self.brought: set[bytes] = set()

    def of(self, row: RoundRow, number: int) -> int | None:
        """How many versions were made between those of round ``number`` and of the open round
        ``row``; None where that is the open round, or one whose updates are none of this model's:
        it was made anew in between, or is of another generation."""
        if self._row is None or (self._row.round, self._row.version) != (row.round, row.version):
            self._row, self._known = row, {}
            self.brought = self._store.log.of_other_rounds(row.round)
        if number not in self._known:
            self._known[number] = self._find(row, number)
        return self._known[number]

    def _find(self, row: RoundRow, number: int) -> int | None:
        before = self._store.rounds.find(number) if number < row.round else None
        if before is None or before.generation != row.generation:
            return None
        age = row.version - before.version
        # A version that no round made is another model: the operator went back, say.
        return age if self._store.rounds.made(number, row.round) == age else None


def decode_each(
    binding: GuardedBinding, sent: Sequence[Sent], items: int
) -> list[Update | WireError]:
    """The updates in many bodies, in their order; an error in the place of a bad one."""
    found: list[Update | WireError] = []
    for number, group in groupby(sent, lambda each: each.round):
        bodies = list(group)
        named = [(each.body, each.device_id.hex()) for each in bodies]
        for each, update in zip(bodies, binding.decode_each(named, number, items), strict=True):
            found.append(each.aged(update) if isinstance(update, Update) else update)
    return found
