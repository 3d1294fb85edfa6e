"""A service's lives, from the start of a serve to its end; and a serve without a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from aggregator.errors import AggregatorError, StoreAway
from aggregator.events import LogEvent
from aggregator.home import AggregatorHome
from aggregator.rounds.machine import RoundEvent
from aggregator.serve.assembly import World, assemble
from aggregator.serve.reach import Reaching
from aggregator.serve.service import Service
from aggregator.serve.successor import BrokerMoved
from aggregator.store import STORE_FAILURES, Store
from aggregator.task.file import Task


def begin_alone(store: Store) -> None:
    """End what is left of a cluster. Raises AggregatorError while one serves the fleet, and as
    :func:`require_no_shares`."""
    with store.database.transaction():
        store.end_cluster()
        require_no_shares(store)


def require_no_shares(store: Store) -> None:
    """Raises AggregatorError where a round has sums of a cluster's workers, which one process alone
    would leave out."""
    for task in store.tasks.all():
        if store.task(task.number).shares.summed():
            raise AggregatorError(
                f"task {task.name} has sums of a cluster's workers that are in no version yet: "
                "let its round end under serve --cluster ray first"
            )


@dataclass(frozen=True)
class Hooks:
    """What is called while a fleet is served: of what happens to rounds, in each turn, and with a
    service that was made, before it connects; and why the console does not answer, if so."""

    on_round: Callable[[RoundEvent], None] | None = None
    on_turn: Callable[[Service], None] = lambda service: None
    on_ready: Callable[[Service], None] = lambda service: None
    console_problem: Callable[[], str] = str


@dataclass
class ServiceLives(ABC):
    """A service's lives, one after another, until ``stopping()``.

    A store that is away is waited for. Where it goes in the midst of something, all that is in
    memory is dropped and made anew from what the store has then, as after a crash: whatever was
    half done, and wherever that was, there is one way back, and what was receipted is not lost.
    Another life begins too where the fleet moves to another broker.

    ``task``: the first one, as it is served: it may be replaced.
    """

    home: AggregatorHome
    task: Task
    world: World
    store: Store
    reach: Reaching
    stopping: Callable[[], bool]
    hooks: Hooks

    @abstractmethod
    def make(self) -> Service:
        """The service of a life. Raises AggregatorError."""

    @abstractmethod
    def end(self, service: Service) -> None:
        """It was asked to end."""

    def end_without_store(self) -> None:
        """Likewise, while the store is away."""
        LogEvent.STORE_LEFT.log()

    def fail(self, service: Service | None, error: BaseException) -> None:
        """A life ends with an error."""
        if service is not None:
            with suppress(*STORE_FAILURES):
                service.stop()

    def turn(self, service: Service) -> None:
        """Called often."""
        self.reach.look()
        self.hooks.on_turn(service)

    def run(self) -> None:
        """Raises AggregatorError."""
        while not self.stopping():
            self._one_life()

    def _one_life(self) -> None:
        service: Service | None = None
        try:
            service = self.make()
            try:
                self._work(service)
            except BrokerMoved:
                LogEvent.BROKER_CHANGES.log()
                service.end()
            else:
                self.end(service)
        except StoreAway as error:
            self.reach.waits(str(error))
            if service is not None:
                service.abandon()
            if self.stopping():
                self.end_without_store()
        except BaseException as error:
            self.fail(service, error)
            raise
        if service is not None:
            self.task = service.first_task

    def _work(self, service: Service) -> None:
        self.hooks.on_ready(service)
        self.reach.serve(service.link, service.refused_topics, lambda: service.receipt_times)
        service.link.start()
        service.run(self.stopping, lambda: self.turn(service))


class _Alone(ServiceLives):
    def make(self) -> Service:
        begin_alone(self.store)
        parts = assemble(self.home, self.store, self.task, self.world)
        return Service(parts, self.hooks.on_round)

    def end(self, service: Service) -> None:
        service.end()


NO_HOOKS = Hooks()


def serve_alone(
    home: AggregatorHome,
    task: Task,
    world: World,
    stopping: Callable[[], bool],
    hooks: Hooks = NO_HOOKS,
) -> None:
    """Run a fleet until ``stopping()``. Raises AggregatorError."""
    told = hooks.console_problem
    reach = Reaching(home.live_file, world.unix_clock, world.sleep, stopping, told)
    try:
        store = reach.await_store(home.open_store)
        if store is None:
            return
        store.database.waits = reach.waits
        try:
            _Alone(home, task, world, store, reach, stopping, hooks).run()
        finally:
            store.database.close()
    finally:
        reach.close()
