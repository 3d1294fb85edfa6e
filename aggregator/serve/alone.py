"""A serve without a cluster, from its start to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from aggregator.errors import AggregatorError, StoreAway
from aggregator.home import AggregatorHome
from aggregator.rounds.machine import RoundEvent
from aggregator.serve.assembly import World, assemble
from aggregator.serve.reach import Reaching
from aggregator.serve.service import Service
from aggregator.serve.successor import BrokerMoved
from aggregator.store import STORE_FAILURES, Store
from aggregator.task.file import Task

_LOG = logging.getLogger(__name__)


def begin_alone(store: Store) -> None:
    """End what is left of a cluster. Raises AggregatorError while one serves the fleet, and where
    a round has sums of its workers, which one process alone would leave out."""
    with store.database.transaction():
        store.end_cluster()
        for task in store.tasks.all():
            if store.task(task.number).shares.summed():
                raise AggregatorError(
                    f"task {task.name} has sums of a cluster's workers that are in no version yet: "
                    "let its round end under serve --cluster ray first"
                )


def serve_alone(
    home: AggregatorHome,
    task: Task,
    world: World,
    stopping: Callable[[], bool],
    *,
    on_round: Callable[[RoundEvent], None] | None = None,
    on_turn: Callable[[Service], None] = lambda service: None,
    on_ready: Callable[[Service], None] = lambda service: None,
) -> None:
    """Run a fleet until ``stopping()``. Raises AggregatorError.

    A store that is away is waited for. Where it goes in the midst of something, all that is in
    memory is dropped and made anew from what the store has then, as after a crash: whatever was
    half done, and wherever that was, there is one way back, and what was receipted is not lost.
    """
    reach = Reaching(home.live_file, world.unix_clock, world.sleep, stopping)
    try:
        store = reach.await_store(home.open_store)
        if store is None:
            return
        store.database.waits = reach.waits
        try:
            while not stopping():
                task = _one_life(
                    home, store, task, world, stopping, reach, on_round, on_turn, on_ready
                )
        finally:
            store.database.close()
    finally:
        reach.close()


def _one_life(
    home: AggregatorHome,
    store: Store,
    task: Task,
    world: World,
    stopping: Callable[[], bool],
    reach: Reaching,
    on_round: Callable[[RoundEvent], None] | None,
    on_turn: Callable[[Service], None],
    on_ready: Callable[[Service], None],
) -> Task:
    """Until we are asked to end, the store went away in the midst of something, or the fleet moves
    to another broker; the first task as it is served then, which may have been replaced."""
    service: Service | None = None
    try:
        begin_alone(store)
        service = Service(assemble(home, store, task, world), on_round)
        try:
            run_service(service, reach, stopping, on_turn, on_ready)
        except BrokerMoved:
            _LOG.info("the fleet's broker is to be another one, or two: connecting anew")
        service.end()
    except StoreAway as error:
        reach.waits(str(error))
        if service is not None:
            service.abandon()
        if stopping():
            _LOG.warning("it ends without its store: what is not committed comes again")
    except BaseException:
        if service is not None:
            with suppress(*STORE_FAILURES):
                service.stop()
        raise
    return task if service is None else service.first_task


def run_service(
    service: Service,
    reach: Reaching,
    stopping: Callable[[], bool],
    on_turn: Callable[[Service], None],
    on_ready: Callable[[Service], None],
) -> None:
    """Connect, and work."""
    link = service.link

    def turn() -> None:
        reach.look()
        on_turn(service)

    on_ready(service)
    reach.serve(link)
    link.start()
    service.run(stopping, turn)
