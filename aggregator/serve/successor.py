"""The fleet's move to another broker: what the operator asked for, and where serve is meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from aggregator.errors import AggregatorError
from aggregator.store import Store
from aggregator.task.cluster import Cluster
from device_sdk.link.broker_url import BrokerWay
from device_sdk.wire.seal.announcement import MOST_REVISION, Successor


class BrokerMoved(Exception):
    """This life's connections are not those that there are to be: another one begins."""


@dataclass(frozen=True, slots=True)
class Move:
    """From one broker, or those of a move that was still under way, to another.

    Attributes:
        announced: what devices are told.
        left: how serve itself reaches the brokers where devices may be still, the last one first.
        new: how it reaches the one that they are told.
        before: the URL that they knew, where an earlier move told them; empty: their own.
        named: the broker in the task file when this was asked for, and so no newer word.
        is_called_off: whether this takes an announcement back.
        is_reached: whether a device has had a session with serve at the new one.
    """

    announced: Successor
    left: tuple[BrokerWay, ...]
    new: BrokerWay
    before: str
    named: str
    is_called_off: bool = False
    is_reached: bool = False

    @property
    def until_unix_seconds(self) -> int:
        """Up to when all of them are served, or longer: until the new one is reached."""
        return self.announced.until_unix_seconds

    def is_over(self, now_unix_seconds: float) -> bool:
        """Whether the new one alone is served: a word has not moved the fleet before a device was
        there, and what works is left for nothing less."""
        return self.is_reached and now_unix_seconds >= self.until_unix_seconds

    def ways(self, named: BrokerWay, now_unix_seconds: float) -> tuple[BrokerWay, ...]:
        """Where to be, the first one first, where the task file names ``named``: at all of them
        until the grace is over and a device has been at the new one, then there alone, whichever of
        them the file has. Another is the operator's newer word."""
        if not self.is_about(named):
            return (named,)
        address = named.url.address
        every = [named if each.url.address == address else each for each in self._places]
        return tuple(every[:1] if self.is_over(now_unix_seconds) else every)

    def is_about(self, named: BrokerWay) -> bool:
        """Whether what the task file names is no newer word than this."""
        address = named.url.address
        return address in (self.named, *(each.url.address for each in self._places))

    @property
    def _places(self) -> tuple[BrokerWay, ...]:
        return self.new, *self.left


def find_move(store: Store) -> Move | None:
    """The one that was asked for last."""
    said = store.facts.successor
    if not said:
        return None
    announced, left, new, *others = json.loads(said)
    ways = tuple(map(BrokerWay.from_text, left))
    return Move(Successor(*announced), ways, BrokerWay.from_text(new), *others)


def ask_for_move(store: Store, move: Move) -> None:
    """Have serve announce it, and go there."""
    announced, left, new, *others = (getattr(move, each) for each in Move.__slots__)
    values = [astuple(announced), [each.text for each in left], new.text, *others]
    store.facts.successor = json.dumps(values)


def next_move(
    store: Store, named: BrokerWay, told: str, new: BrokerWay, until: int, now_unix_seconds: float
) -> Move:
    """From wherever serve is by now, where whoever is at one of those brokers hears of it."""
    last = find_move(store)
    left = [
        each
        for each in where_serve_is(last, named, now_unix_seconds)
        if each.url.address != new.url.address
    ]
    before = last.announced.url if last is not None and last.is_about(named) else ""
    announced = Successor(next_revision(store, now_unix_seconds), told, until)
    return Move(announced, tuple(left), new, before, named.url.address)


def call_off(store: Store, move: Move, now_unix_seconds: float) -> Move:
    """Back to the broker before, by the same way: who has moved hears of it where he is."""
    revision = next_revision(store, now_unix_seconds)
    announced = Successor(revision, move.before, move.until_unix_seconds)
    back, *others = move.left
    return replace(
        move,
        announced=announced,
        left=(move.new, *others),
        new=back,
        is_called_off=True,
        is_reached=False,
    )


def where_serve_is(
    move: Move | None, named: BrokerWay, now_unix_seconds: float
) -> tuple[BrokerWay, ...]:
    """The brokers, the first one first, where the task file names ``named``."""
    return (named,) if move is None else move.ways(named, now_unix_seconds)


def next_revision(store: Store, now_unix_seconds: float) -> int:
    """Above all before it, in this home and in what it was put back from. After the last number
    that there is, whatever brought it here, it begins anew: devices heed that from the next
    descriptor on."""
    last = find_move(store)
    above = 0 if last is None else last.announced.revision + 1
    return max(int(now_unix_seconds), above if above <= MOST_REVISION else 0)


class WatchMove:
    """Whether serve is to be elsewhere than it is. ``named``: the task file's way."""

    def __init__(self, store: Store, named: BrokerWay, unix_clock: Callable[[], float]) -> None:
        self._store, self._named, self._unix_clock = store, named, unix_clock
        self.move = find_move(store)
        self.ways = self._ways(self.move)

    @property
    def announced(self) -> Successor | None:
        """What to tell devices; None where there is nothing, and where serve is at a broker that
        the task file names since: there it is, and not where the fleet moved before."""
        move = self.move
        return None if move is None or not move.is_about(self._named) else move.announced

    def reached(self) -> None:
        """A device has a session at the first of the brokers."""
        move = self.move
        if move is None or move.is_reached or len(self.ways) == 1:
            return
        with self._store.database.transaction():
            if find_move(self._store) == move:  # or else there is a newer one
                self.move = replace(move, is_reached=True)
                ask_for_move(self._store, self.move)

    def require_same(self) -> None:
        """To be called where the operator may have changed something. Raises BrokerMoved."""
        move = find_move(self._store)
        if move != self.move or self._ways(move) != self.ways:
            raise BrokerMoved

    def require_time(self) -> None:
        """To be called often. Raises BrokerMoved once the grace is over."""
        if len(self.ways) > 1 and self._ways(self.move) != self.ways:
            raise BrokerMoved

    def _ways(self, move: Move | None) -> tuple[BrokerWay, ...]:
        return where_serve_is(move, self._named, self._unix_clock())


def require_movable(cluster: Cluster) -> None:
    """Raises AggregatorError where brokers are cells, by whose names devices are told them."""
    if any(each.name for each in cluster.cells):
        raise AggregatorError(
            "this fleet has cells: devices are told theirs, and move when [[cluster.cells]] changes"
        )
