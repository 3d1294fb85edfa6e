"""A coordinator's process, from the lease to its end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from aggregator.cluster.coordinator import Coordinating, Crew, Runtime, posts
from aggregator.cluster.orders import Post
from aggregator.errors import AggregatorError
from aggregator.events import LogEvent
from aggregator.home import AggregatorHome, is_served
from aggregator.keys.folder import read_serving_keys
from aggregator.rounds.replacement import buildable
from aggregator.serve.alone import NO_HOOKS, Hooks, ServiceLives
from aggregator.serve.assembly import World, assemble
from aggregator.serve.reach import Reaching
from aggregator.serve.service import Service
from aggregator.store import STORE_FAILURES, Store
from aggregator.store.cluster import Deposed
from aggregator.store.rows import LeaseRow
from aggregator.store.tasks import FIRST
from aggregator.task.artifacts import read_artifacts
from aggregator.task.file import Task, read_continued_catalogue, read_task
from device_sdk.system.version import __version__

LEASE_SECONDS = 6.0
_RENEW_SECONDS = 1.5
_LOOK_SECONDS = 0.5
_STUCK_SECONDS = 120.0


class Lease:
    """Held from :meth:`take` on by a thread with a connection of its own: a round that takes long
    to close costs no lease. It is renewed while :meth:`alive` is called now and then.

    ``store``: a connection of its own, which it closes; ``holder`` and ``program`` are for people.
    ``clock`` gives monotonic seconds; ``ending`` is what it waits on, and is set by :meth:`end`.
    """

    def __init__(
        self,
        store: Store,
        holder: str,
        program: str,
        clock: Callable[[], float],
        ending: threading.Event,
    ) -> None:
        self._store = store
        self._holder, self._program = holder, program
        self._clock = clock
        self._alive_seconds = clock()
        self._ending = ending
        self._thread = threading.Thread(target=self._renew, name="tessera-lease", daemon=True)
        self.term = 0
        """Of ours; 0 before it was taken."""
        self.lost: Deposed | None = None
        """Why it is not ours any more."""

    def take(self, stopping: Callable[[], bool], *, wait: bool) -> bool:
        """Whether it is ours now; else ``stopping``. Raises AggregatorError where another process
        holds it, and it is not to be waited for. Who waits outlasts a store that is away."""
        said: LeaseRow | None = None
        away = False
        while not stopping():
            try:
                row = self._take()
            except STORE_FAILURES as error:
                if not wait:
                    raise
                if not away:
                    LogEvent.STANDS_BY_ALONE.log(problem=error)
                away = True
                self._ending.wait(_RENEW_SECONDS)
                continue
            away = False
            if row is None:
                return True
            if not wait:
                self.require_free(stopping)
            elif said is None or said.term != row.term:
                said = row
                LogEvent.STANDS_BY.log(holder=row.holder, term=row.term)
            self._ending.wait(_LOOK_SECONDS)
        return False

    def require_free(self, stopping: Callable[[], bool]) -> None:
        """Raises AggregatorError while another process holds it and renews it: one that was killed
        is found out after one lease."""
        row = self._store.lease.find()
        if row is not None and self._outlives(row.until_unix_seconds, stopping):
            raise AggregatorError(
                f"{row.holder} coordinates this fleet: stop it first. In a Ray cluster (--address) "
                "another one may wait until it is gone, with --standby"
            )

    def _take(self) -> LeaseRow | None:
        """None, once it is ours; else who has it."""
        term = self._store.lease.take(self._holder, self._program, LEASE_SECONDS)
        if term is None:
            row = self._store.lease.find()
            assert row is not None
            return row
        self.term = term
        self._thread.start()
        return None

    def require(self, store: Store) -> None:
        """Inside a transaction of ``store``: nobody else writes as the coordinator up to its end.
        Raises Deposed."""
        store.lease.require(self.term)

    def alive(self) -> None:
        """The process still does its work. Raises Deposed."""
        self._alive_seconds = self._clock()
        if self.lost is not None:
            raise self.lost

    def end(self) -> None:
        """Let go of it: a standby need not wait."""
        self._ending.set()
        if self.term and self.lost is None:
            self._thread.join()
            try:
                self._store.lease.release(self.term)
            except (Deposed, *STORE_FAILURES) as error:
                LogEvent.LEASE_KEPT.log(problem=error)
        self._store.database.close()

    def _outlives(self, until_unix_seconds: float, stopping: Callable[[], bool]) -> bool:
        """Whether it is renewed beyond what was seen of it."""
        while not stopping():
            row = self._store.lease.find()
            if row is None or not self._store.lease.is_held():
                return False
            if row.until_unix_seconds > until_unix_seconds:
                return True
            self._ending.wait(_LOOK_SECONDS)
        return False

    def _renew(self) -> None:
        while not self._ending.wait(_RENEW_SECONDS):
            if self._clock() - self._alive_seconds > _STUCK_SECONDS:
                continue  # the process hangs: another one shall take over
            try:
                self._store.lease.renew(self.term, LEASE_SECONDS)
            except Deposed as error:
                self.lost = error
                return
            except STORE_FAILURES as error:
                LogEvent.LEASE_NOT_RENEWED.log(problem=error)


def require_servable(home: AggregatorHome, task: Task, unix_clock: Callable[[], float]) -> None:
    """Raises AggregatorError where this machine lacks something that whoever takes over needs: the
    keys that are honoured, the tasks' files, and what these name."""
    store = home.open_store()
    try:
        read_serving_keys(home, store, unix_clock)
        for row in store.tasks.all():
            if row.state in ("retiring", "retired"):
                continue
            one = task
            if row.number != FIRST:
                one = read_task(home.folder / row.file, task.fleet)
            buildable(store, one)
            read_artifacts(one)
            if one.catalogue is not None:
                read_continued_catalogue(one.catalogue, store.task(row.number))
    except AggregatorError as error:
        raise AggregatorError(
            f"this machine could not take over: {error}. A standby needs all of the home but its "
            "store, as it is on the coordinator's machine"
        ) from None
    finally:
        store.database.close()


def _require_not_served(home: AggregatorHome) -> None:
    if is_served(home):
        raise AggregatorError(f"a serve without --cluster runs on {home.folder}: stop it first")


def coordinate(
    home: AggregatorHome,
    task: Task,
    world: World,
    start: Callable[[list[Post]], Runtime],
    stopping: Callable[[], bool],
    *,
    standby: bool = False,
    join: Callable[[], bool] = lambda: True,
    hooks: Hooks = NO_HOOKS,
) -> None:
    """Run a fleet with workers until ``stopping()``.

    ``start`` gets workers running. ``standby``: wait while another process coordinates. ``join``:
    what ``start`` needs and may fail for long, done before the lease is taken; False where we were
    asked to end meanwhile. Raises AggregatorError, and Deposed where another process took the
    lease.
    """
    _require_not_served(home)
    with ExitStack() as stack:
        told = hooks.console_problem
        reach = Reaching(home.live_file, world.unix_clock, world.sleep, stopping, told)
        stack.callback(reach.close)
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        first = reach.await_store(home.open_store)
        if first is None:
            return
        lease = Lease(first, holder, __version__, world.clock, threading.Event())
        stack.callback(lease.end)
        if standby:
            require_servable(home, task, world.unix_clock)
        else:
            lease.require_free(stopping)
        if not join() or not lease.take(stopping, wait=standby):
            return
        _require_not_served(home)  # it looks for the lease once it has the home: one of us sees
        LogEvent.COORDINATES.log(term=lease.term)
        store = reach.await_store(home.open_store)
        if store is None:
            return
        stack.callback(store.database.close)
        store.database.guard = lambda: lease.require(store)

        def waits(problem: str) -> bool:
            lease.alive()
            return reach.waits(problem)

        store.database.waits = waits
        _Coordination(home, task, world, store, reach, stopping, hooks, lease, start).run()


@dataclass
class _Coordination(ServiceLives):
    """Those of a coordinator that has the lease, with the same workers."""

    lease: Lease
    start: Callable[[list[Post]], Runtime]
    runtime: Runtime | None = None
    crew: Crew | None = None

    def make(self) -> Service:
        cluster, fleet = self.task.fleet.cluster, self.task.fleet
        role = Coordinating(cluster)
        parts = assemble(self.home, self.store, self.task, self.world, role=role)

        def where() -> list[Post]:
            return posts(self.home, self.store, cluster, fleet, parts.move.ways)

        if self.runtime is None:
            self.runtime = self.start(where())
        else:
            self.runtime.post(where())
        role.fetch = self.runtime.shares
        self.crew = Crew(self.runtime, self.home, parts, where)
        return Service(parts, self.hooks.on_round, self.crew.complete)

    def turn(self, service: Service) -> None:
        self.lease.alive()
        assert self.crew is not None
        self.crew.tend()
        super().turn(service)

    def end(self, service: Service) -> None:
        self._end_workers()
        service.stop()

    def end_without_store(self) -> None:
        self._end_workers()

    def fail(self, service: Service | None, error: BaseException) -> None:
        if isinstance(error, Deposed):
            if service is not None:
                service.abandon()
            if self.runtime is not None:
                self.runtime.leave()
            return
        self._end_workers()
        super().fail(service, error)

    def _end_workers(self) -> None:
        if self.runtime is not None:
            self.runtime.stop()
