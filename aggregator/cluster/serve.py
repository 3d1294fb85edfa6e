"""A coordinator's process, from the lease to its end."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from aggregator.cluster.coordinator import Coordinating, Crew, Runtime, posts
from aggregator.cluster.lease import Lease
from aggregator.cluster.orders import Post
from aggregator.errors import AggregatorError, StoreAway
from aggregator.home import AggregatorHome, is_served
from aggregator.keys.folder import read_serving_keys
from aggregator.rounds.machine import RoundEvent
from aggregator.rounds.replacement import buildable
from aggregator.serve.alone import run_service
from aggregator.serve.assembly import World, assemble
from aggregator.serve.reach import Reaching
from aggregator.serve.service import Service
from aggregator.serve.successor import BrokerMoved
from aggregator.store import STORE_FAILURES, Store
from aggregator.store.cluster import Deposed
from aggregator.store.tasks import FIRST
from aggregator.task.artifacts import read_artifacts
from aggregator.task.file import Task, read_continued_catalogue, read_task
from device_sdk.system.version import __version__

_LOG = logging.getLogger(__name__)


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
            read_artifacts(one.artifacts, one.companions)
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
    on_round: Callable[[RoundEvent], None] | None = None,
    on_turn: Callable[[Service], None] = lambda service: None,
    on_ready: Callable[[Service], None] = lambda service: None,
) -> None:
    """Run a fleet with workers until ``stopping()``.

    ``start`` gets workers running. ``standby``: wait while another process coordinates. ``join``:
    what ``start`` needs and may fail for long, done before the lease is taken; False where we were
    asked to end meanwhile. Raises AggregatorError, and Deposed where another process took the
    lease.
    """
    _require_not_served(home)
    with ExitStack() as stack:
        reach = Reaching(home.live_file, world.unix_clock, world.sleep, stopping)
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
        _LOG.info("coordinating, term %d", lease.term)
        store = reach.await_store(home.open_store)
        if store is None:
            return
        stack.callback(store.database.close)
        store.database.guard = lambda: lease.require(store)
        coordination = _Coordination(home, task, world, store, lease, reach, stopping, start)
        while not stopping():
            coordination.one_life(on_round, on_turn, on_ready)


@dataclass
class _Coordination:
    """A coordinator that has the lease: lives of a service, one after another where the store went
    away in the midst of something, with the same workers."""

    home: AggregatorHome
    task: Task
    world: World
    store: Store
    lease: Lease
    reach: Reaching
    stopping: Callable[[], bool]
    start: Callable[[list[Post]], Runtime]
    runtime: Runtime | None = None

    def __post_init__(self) -> None:
        def waits(problem: str) -> bool:
            self.lease.alive()
            return self.reach.waits(problem)

        self.store.database.waits = waits

    def one_life(
        self,
        on_round: Callable[[RoundEvent], None] | None,
        on_turn: Callable[[Service], None],
        on_ready: Callable[[Service], None],
    ) -> None:
        """Until we are asked to end, the store went away, or the fleet moves to another broker;
        ``task`` is then the first one as it was served, which may have been replaced. Raises
        Deposed, AggregatorError."""
        service: Service | None = None
        try:
            cluster = self.task.fleet.cluster
            role = Coordinating(cluster)
            parts = assemble(self.home, self.store, self.task, self.world, role=role)
            fleet, ways = self.task.fleet, parts.move.ways

            def where() -> list[Post]:
                return posts(self.home, self.store, cluster, fleet, ways)

            if self.runtime is None:
                self.runtime = self.start(where())
            else:
                self.runtime.post(where())
            role.fetch = self.runtime.shares
            crew = Crew(self.runtime, self.home, parts, where)
            service = Service(parts, on_round, crew.complete)

            def tend(service: Service) -> None:
                self.lease.alive()
                crew.tend()
                on_turn(service)

            try:
                run_service(service, self.reach, self.stopping, tend, on_ready)
            except BrokerMoved:
                _LOG.info("the fleet's broker is to be another one, or two: connecting anew")
                service.end()
                self.task = service.first_task
                return
            self.runtime.stop()
            service.stop()
        except StoreAway as error:
            self.reach.waits(str(error))
            if service is not None:
                service.abandon()
                self.task = service.first_task
            if self.stopping() and self.runtime is not None:
                self.runtime.stop()
        except Deposed:
            if service is not None:
                service.abandon()
            if self.runtime is not None:
                self.runtime.leave()
            raise
        except BaseException:
            if self.runtime is not None:
                self.runtime.stop()
            if service is not None:
                with suppress(*STORE_FAILURES):
                    service.stop()
            raise
