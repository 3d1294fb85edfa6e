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
from aggregator.rounds.machine import RoundEvent
from aggregator.serve.assembly import World, assemble
from aggregator.serve.service import Service
from aggregator.store.cluster import Deposed
from aggregator.task.file import Task
from device_sdk.system.version import __version__

_LOG = logging.getLogger(__name__)


def coordinate(
    home: AggregatorHome,
    task: Task,
    world: World,
    start: Callable[[list[Post]], Runtime],
    stopping: Callable[[], bool],
    *,
    standby: bool = False,
    on_round: Callable[[RoundEvent], None] | None = None,
    on_turn: Callable[[Service], None] = lambda service: None,
    on_ready: Callable[[Service], None] = lambda service: None,
) -> None:
    """Run a fleet with workers until ``stopping()``.

    ``start`` gets workers running. ``standby``: wait while another process coordinates. Raises
    AggregatorError, and Deposed where another process took the lease.
    """
    cluster = task.fleet.cluster
    if is_served(home):
        raise AggregatorError(f"a serve without --cluster runs on {home.folder}: stop it first")
    with ExitStack() as stack:
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        lease = Lease(home.open_store, holder, __version__, world.clock, threading.Event())
        stack.callback(lease.end)
        if not lease.take(stopping, wait=standby):
            return
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
