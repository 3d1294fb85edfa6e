"""The coordinator: today's service without what devices send, and the orders of its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from aggregator.cluster.orders import Orders, Post, ServedTask, material
from aggregator.cluster.worker import (
    StoredMarks,
    WorkerStatus,
    client_name,
    life_of_cluster,
    placement_in,
)
from aggregator.errors import AggregatorError, MethodFault
from aggregator.guard import GuardedMethod
from aggregator.home import AggregatorHome
from aggregator.rounds.aggregation import Aggregation
from aggregator.rounds.attendance import Attendance, CommittedAttendance
from aggregator.serve.assembly import Whole
from aggregator.serve.broker_links import BrokerLinks, Hears, links_to
from aggregator.serve.metrics import Snapshot
from aggregator.serve.service import Parts
from aggregator.shared import Shared
from aggregator.store import Store, TaskStore
from aggregator.store.rows import RoundRow, ShareRow
from aggregator.store.versions import unpack_state
from aggregator.task.artifacts import read_artifacts
from aggregator.task.cluster import Cell, Cluster
from aggregator.task.file import RoundSettings, SharedSettings
from device_sdk.link import LinkSettings
from device_sdk.link.broker_url import BrokerWay
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.announcement import Presence
from device_sdk.wire.seal.freshness import Freshness, FreshnessMarks
from device_sdk.wire.seal.keys import RandomBytes

Fetch = Callable[[int, Sequence[ShareRow]], list[bytes | None]]
"""Workers' own copies of the states that a task's rows are of: None for what none has any more."""


def from_store(task: int, rows: Sequence[ShareRow]) -> list[bytes | None]:
    """A :data:`Fetch` that asks nobody."""
    return [None] * len(rows)


class GatheredAggregation(Aggregation):
    """Absorbs nothing before the round closes: bodies then, by device, and workers' sums. The same
    updates give the same bits, whoever took them in, and in whatever order."""

    fetch: Fetch = staticmethod(from_store)

    def resume(self, open_round: RoundRow | None) -> None:
        with self._store.database.transaction():
            self._store.checkpoints.drop_partial()
        self._built = None
        self._restore(open_round)
        self.participants = self._waiting()

    def carry_over(self, row: RoundRow) -> None:
        """What rounds without quorum left waits for the end of this one, too."""
        self._restore(row)
        self.participants = self._waiting()

    def gathered(self) -> int:
        return self._waiting()

    def gather(self, row: RoundRow, now_unix_seconds: float) -> bool:
        """End the round's entry, once what is being committed is; then take in everything. What
        workers could not absorb holds the round."""
        with self._store.database.transaction():
            self._store.rounds.end_entry(row.round, now_unix_seconds)
            bad = self._store.log.quarantined()
            if bad:
                _, device_id, why = bad[0]
                what = f"an update of {device_id.hex()} is in quarantine: {why}"
                self._store.rounds.hold(row.round, what)
        if bad:
            return False
        self._restore(row)
        for logged in self._store.log.by_device():
            try:
                self._method.absorb(self.decode(row, logged))
            except (MethodFault, WireError) as error:
                self._quarantine(row, logged, error)
                return False
            self.participants += 1
        sums = self._store.shares.sums()
        fetched = zip(sums, self.fetch(self._store.number, sums), strict=True)
        for number, shares in groupby(fetched, lambda each: each[0].round):
            # Of a round without quorum first the whole, as if one process had had all of it.
            method = self._method if number == row.round else self._opened_anew(number)
            for share, found in shares:
                state = self._store.shares.state(share) if found is None else found
                method.merge(unpack_state(state))
            if method is not self._method:
                self._method.merge(method.share())
        self.participants = self._waiting()
        return True

    def _opened_anew(self, number: int) -> GuardedMethod:
        """The method as it was when an earlier round opened, since which no version was made."""
        version = self._store.checkpoints.get("version")
        assert version is not None
        method = self._new_method(self.items)
        method.restore(version.state)
        method.open_round(number)
        return method

    def _waiting(self) -> int:
        return self._store.log.waiting() + self._store.shares.summed()


_TEND_SECONDS = 0.5
_POST_SECONDS = 15.0


class Coordinating(Whole):
    """A cluster's coordinator."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(placement_in(cluster))
        self._cells = cluster.cells
        self.fetch: Fetch = from_store
        """Where workers' sums are asked for first."""

    def aggregation(self, *parts: Any) -> Aggregation:
        made = GatheredAggregation(*parts)
        made.fetch = lambda task, rows: self.fetch(task, rows)
        return made

    def begin_life(
        self, store: Store, now_unix_seconds: int, random_bytes: RandomBytes
    ) -> Presence:
        """That of the coordinator before, where there was one: sessions outlast it."""
        with store.database.transaction():
            return life_of_cluster(store, now_unix_seconds, random_bytes)

    def marks(self, store: Store, life: Presence) -> FreshnessMarks:
        return _MarksAtOnce(store, life.incarnation)

    def attendance(self, store: TaskStore, settings: RoundSettings) -> Attendance:
        return CommittedAttendance(store, settings)

    def links(
        self,
        shared: Shared,
        settings: LinkSettings,
        rngs: list[np.random.Generator],
        ways: Sequence[BrokerWay],
    ) -> BrokerLinks:
        root_fingerprint = shared.store.facts.root_fingerprint
        ends = [
            (way, Hears((), client=client_name(root_fingerprint, -place)))
            for place, cell in enumerate(self._cells, 1)
            for way in ways_to(cell, shared.settings, ways)
        ]
        return links_to(shared, settings, rngs, ends)

    def changed(self, store: Store) -> Callable[[], bool]:
        return OperatorWatch(store)


class _MarksAtOnce(StoredMarks):
    """Each is written down before its answer is made: requests are few."""

    def __init__(self, store: Store, incarnation: bytes) -> None:
        super().__init__(incarnation, store.granted)
        self._database = store.database

    def raise_to(self, sender: bytes, freshness: Freshness) -> None:
        super().raise_to(sender, freshness)
        with self._database.transaction():
            refused = self.save()
        if refused:
            raise WireError("replayed", "a request with this counter was answered before")


class OperatorWatch:
    """Whether the operator's commands, or a device that leaves, changed something.

    Workers commit all the time: that something was written says nothing here.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = self._look()

    def __call__(self) -> bool:
        if not self._store.database.changed_elsewhere():
            return False
        before, self._seen = self._seen, self._look()
        return self._seen != before

    def _look(self) -> tuple[object, ...]:
        store = self._store
        rows = store.tasks.all()
        tasks = [store.task(row.number) for row in rows]
        return (
            rows,
            store.devices.revision(),
            [each.serial for each in store.secrets.descriptors()],
            [each.epoch for each in store.secrets.group_keys()],
            store.facts.successor,
            [(each.facts.unpublished, each.versions.awaited()) for each in tasks],
            [[row.held for row in each.rounds.latest()] for each in tasks],
        )


def ways_to(
    cell: Cell, settings: SharedSettings, ways: Sequence[BrokerWay]
) -> tuple[BrokerWay, ...]:
    """To a cell's broker. Where it has none of its own it is the fleet's, and ``ways`` say where
    that is, the first one first: several while the fleet moves."""
    if cell.broker is not None:
        return (settings.broker.way.at(cell.broker),)
    return tuple(ways) or (settings.broker.way,)


class Runtime(Protocol):
    """Where workers run. Nothing here waits for one of them."""

    def post(self, posts: Sequence[Post]) -> None:
        """These are the workers' posts from now on, in the same order: who was started with another
        one is started anew."""

    def tend(self, revision: int, orders: Orders) -> None:
        """Called often: start who is gone, tell the orders to whom does not follow them yet."""

    def statuses(self) -> list[WorkerStatus]:
        """What workers said last."""

    def shares(self, task: int, rows: Sequence[ShareRow]) -> list[bytes | None]:
        """Workers' own copies of the states that these rows are of; None where the store is to be
        asked. The one thing that waits, for some seconds at most."""

    def stop(self) -> None:
        """Let them commit and answer what they have, and end them."""

    def leave(self) -> None:
        """Without a word to them: another coordinator has them now."""


class Crew:
    """Gives workers their orders; to be tended often. ``posts``: what they are to be started with
    now; a password that was renewed is another one."""

    def __init__(
        self,
        runtime: Runtime,
        home: AggregatorHome,
        parts: Parts,
        posts: Callable[[], Sequence[Post]] | None = None,
    ) -> None:
        self._runtime, self._home, self._parts = runtime, home, parts
        self._posts = posts
        self._post_seconds = parts.clock() + _POST_SECONDS
        self._revision = 0
        self._known: tuple[object, ...] = ()
        self._orders: Orders | None = None
        self._next_seconds = 0.0

    def tend(self) -> None:
        """Tell what changed, and see who lives."""
        now = self._parts.clock()
        if now < self._next_seconds:
            return
        self._next_seconds = now + _TEND_SECONDS
        if now >= self._post_seconds and self._posts is not None:
            self._post_seconds = now + _POST_SECONDS
            with suppress(AggregatorError):  # a file is being written: they go on as they are
                self._runtime.post(self._posts())
        parts, board = self._parts, self._parts.tasks
        known = (tuple(map(id, board.served)), board.absent, tuple(parts.keys.keyring))
        if self._orders is None or known != self._known:
            self._known = known
            self._revision += 1
            self._orders = self._make()
        self._runtime.tend(self._revision, self._orders)
        if len(parts.move.ways) > 1 and any(each.reached for each in self._runtime.statuses()):
            parts.move.reached()

    def complete(self, seen: Snapshot) -> Snapshot:
        """What there is to see, with what workers have of it."""
        found = self._runtime.statuses()
        tasks = []
        for task in seen.tasks:
            of_task = [one for each in found for one in each.tasks if one.name == task.name]
            widths, outcomes = Counter(task.widths), Counter(task.outcomes)
            for one in of_task:
                widths.update(one.widths)
                outcomes.update(one.outcomes)
            counted = task.counted + sum(one.counted for one in of_task)
            tasks.append(replace(task, counted=counted, widths=widths, outcomes=outcomes))
        sessions = seen.sessions + sum(each.sessions for each in found)
        refused = {*seen.refused_subscriptions, *(one for each in found for one in each.refused)}
        return replace(
            seen,
            sessions=sessions,
            tasks=tuple(tasks),
            refused_subscriptions=tuple(sorted(refused)),
        )

    def _make(self) -> Orders:
        parts = self._parts
        return Orders(
            parts.life.incarnation,
            material(self._home, parts.keys),
            tuple(
                ServedTask(
                    each.store.number,
                    each.rounds.generation,
                    each.task,
                    tuple((one.artifact_id, one.content) for one in read_artifacts(each.task)),
                )
                for each in parts.tasks.served
            ),
            parts.tasks.absent,
        )


def _at_hand(ways: tuple[BrokerWay, ...]) -> tuple[BrokerWay, ...]:
    """With today's passwords, for machines that lack their files. Raises AggregatorError where the
    only way's cannot be used."""
    found = []
    for way in ways:
        try:
            found.append(way.read())
        except ValueError as error:
            if len(ways) == 1:
                raise AggregatorError(f"the way to the broker: {error}") from None
            found.append(way)
    return tuple(found)


def posts(
    home: AggregatorHome,
    store: Store,
    cluster: Cluster,
    settings: SharedSettings,
    ways: Sequence[BrokerWay] = (),
) -> list[Post]:
    """One for each worker, with the secrets that it needs itself: its cell's broker's, and those
    of the workers' role in the store, where there is one, as they are today. ``ways``: see
    :func:`ways_to`. Raises AggregatorError."""
    own = home.store_url and (home.named_store() or home.store_url)
    where = home.named_store("worker_store") or cluster.worker_store or own
    cells = tuple(replace(each, broker=None) for each in cluster.cells)
    told = replace(cluster, cells=cells, store=None, worker_store=None, chunk_store="")
    there = {cell: _at_hand(ways_to(cell, settings, ways)) for cell in cluster.cells}
    return [
        Post(
            slot,
            where or home.database.resolve(),
            store.database.identity,
            told,
            replace(
                settings, broker=replace(settings.broker, way=there[slot.cell][0]), cluster=told
            ),
            there[slot.cell],
            store.facts.root_fingerprint,
        )
        for slot in cluster.slots()
    ]
