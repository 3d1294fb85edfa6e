"""A coordinator's process, from the lease to its end."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

from aggregator.cluster.coordinator import Coordinating, Crew, Runtime, posts
from aggregator.cluster.lease import Lease
from aggregator.cluster.orders import Post
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome, is_served
from aggregator.keys.folder import read_serving_keys
from aggregator.rounds.machine import RoundEvent
from aggregator.rounds.replacement import buildable
from aggregator.serve.assembly import World, assemble
from aggregator.serve.service import Service
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
    cluster = task.fleet.cluster
    _require_not_served(home)
    with ExitStack() as stack:
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        lease = Lease(home.open_store, holder, __version__, world.clock, threading.Event())
        stack.callback(lease.end)
        if standby:
            require_servable(home, task, world.unix_clock)
        else:
            lease.require_free(stopping)
        if not join() or not lease.take(stopping, wait=standby):
            return
        _require_not_served(home)  # it looks for the lease once it has the home: one of us sees
        _LOG.info("coordinating, term %d", lease.term)
        store = home.open_store()
        store.database.guard = lambda: lease.require(store)
        try:
            role = Coordinating(cluster)
            parts = assemble(home, store, task, world, role=role)
            runtime = start(posts(home, store, cluster, task.fleet))
            role.fetch = runtime.shares
        except BaseException:
            store.database.close()
            raise
        crew = Crew(runtime, home, parts)
        service = Service(parts, on_round, crew.complete)
        on_ready(service)

        def tend() -> None:
            lease.alive()
            crew.tend()
            on_turn(service)

        parts.link.start()
        try:
            service.run(stopping, tend)
        except Deposed:
            parts.link.stop()
            runtime.leave()
            store.database.close()
            raise
        except BaseException:
            runtime.stop()
            service.stop()
            raise
        runtime.stop()
        service.stop()
