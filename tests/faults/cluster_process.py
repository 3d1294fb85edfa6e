"""The processes of a cluster in a run: the product's coordinator and workers, a tampered clock.

Workers live by themselves, as Ray's detached actors do: a coordinator that starts finds them, by
sockets in a folder.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.cluster import serve
from aggregator.cluster.coordinator import posts
from aggregator.cluster.orders import Orders, Post
from aggregator.cluster.worker import Worker, WorkerStatus
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.serve.assembly import World
from aggregator.store import STORE_FAILURES
from aggregator.store.cluster import Deposed
from aggregator.store.rows import ShareRow
from aggregator.task.cluster import Cell, Cluster
from aggregator.task.file import Task, read_task
from tests.faults.aggregator_process import BRISK_LINK, count_arrivals, shorten_settling
from tests.faults.counters import Counters
from tests.faults.crash_points import arm
from tests.faults.known import known_binding, served_late
from tests.faults.taken_in import TakenIn, taken_by
from tests.servers.namespaces import enter

DEFECT, STORE_ENDED_IT, DEPOSED = 2, 1, 3
"""Exit codes."""
LEASE_SECONDS = 2.0
# A worker that connects waits for thousands of answers, on a machine that may do much else.
_LINK = replace(BRISK_LINK, stall_seconds=5.0, keepalive_seconds=3, connect_timeout_seconds=3.0)
_RENEW_SECONDS, _LOOK_SECONDS = 0.5, 0.2
_ASK_SECONDS = 0.2
_ANSWER_SECONDS = 1.0
_BACKLOG = 64


@dataclass(frozen=True)
class Place:
    """Where a run's processes find what they share.

    Attributes:
        home: the aggregator's.
        store_url: the way to PostgreSQL of this process alone; None: the home's file.
        cells: the brokers, by the URLs by which coordinator and workers reach them.
        machine: the network namespace to be in, if any.
        sockets: a folder of short path, for workers to be found in.
        counters, log: files.
        adds_up: whether rounds do.
        late: whether updates of closed rounds count.
    """

    home: str
    store_url: str | None
    cells: tuple[Cell, ...]
    machine: str | None
    sockets: str
    counters: str
    log: str
    adds_up: bool
    late: bool = False

    def open(self) -> tuple[AggregatorHome, Task]:
        """The home, and the task as it is served."""
        home = AggregatorHome(Path(self.home), self.store_url)
        task = served_late(read_task(home.task_file), late=self.late)
        cluster = Cluster(self.cells, self.store_url)
        return home, replace(
            task,
            binding=known_binding(adds_up=self.adds_up),
            fleet=replace(task.fleet, cluster=cluster),
        )

    def go(self) -> None:
        """To the machine, before anything else is done."""
        if self.machine is not None:
            enter(self.machine)

    def world(self, clock_counters: str) -> World:
        """Its clock jumps."""
        shared = Counters(Path(clock_counters))

        def unix_clock() -> float:
            return time.time() + shared.read("clock_offset_millis") / 1000

        return World(time.monotonic, unix_clock, np.random.default_rng(), link=_LINK)


def coordinate(place: Place, clock_counters: str, point: str, calls: int) -> None:
    """Coordinate, or stand by, until killed or deposed; at ``point``, if any, it kills itself."""
    place.go()
    _log_to(place.log)
    # A product's lease is three times as long.
    vars(serve).update(
        LEASE_SECONDS=LEASE_SECONDS, _RENEW_SECONDS=_RENEW_SECONDS, _LOOK_SECONDS=_LOOK_SECONDS
    )

    def work() -> None:
        if point:
            arm(point, calls)
        home, task = place.open()
        serve.coordinate(
            home,
            task,
            place.world(clock_counters),
            lambda found: Reached(found, Path(place.sockets)),
            lambda: False,
            standby=True,
        )

    _run(work)


def take_in(place: Place, slot: int, clock_counters: str, point: str, calls: int) -> None:
    """Be the worker of a slot until killed or deposed; at ``point``, if any, it kills itself."""
    place.go()
    _log_to(place.log)

    def work() -> None:
        if point:
            arm(point, calls)
        count_arrivals(Counters(Path(place.counters)))
        TakenIn(Counters(taken_by(Path(place.counters), os.getpid()))).watch()
        home, task = place.open()
        cluster = task.fleet.cluster
        store = home.open_store()
        with closing(store.database):
            post = posts(home, store, cluster, task.fleet)[slot]
        worker = Worker(post, place.world(clock_counters))
        _listen(worker, Path(place.sockets), slot)
        worker.run(lambda: False)

    _run(work)


class Reached:
    """Workers that somebody else starts, as a :class:`~aggregator.cluster.coordinator.Runtime`."""

    def __init__(self, posts: Sequence[Post], folder: Path) -> None:
        self._folder = folder
        self._told: tuple[int, Orders] | None = None
        self._ended = threading.Event()
        self._statuses: dict[int, WorkerStatus] = {}
        for post in posts:
            threading.Thread(target=self._keep_told, args=(post.slot.number,), daemon=True).start()

    def post(self, posts: Sequence[Post]) -> None:
        """They keep theirs."""

    def tend(self, revision: int, orders: Orders) -> None:
        self._told = revision, orders

    def statuses(self) -> list[WorkerStatus]:
        return list(self._statuses.values())

    def shares(self, task: int, rows: Sequence[ShareRow]) -> list[bytes | None]:
        """From whoever answers at once."""
        return [self._share(task, row) for row in rows]

    def stop(self) -> None:
        """They go on."""
        self._ended.set()

    def leave(self) -> None:
        self._ended.set()

    def _share(self, task: int, row: ShareRow) -> bytes | None:
        with suppress(OSError, EOFError), _reach(self._folder, row.slot) as worker:
            found: bytes | None = _ask(worker, row.epoch, task, row.round, row.commits)
            return found
        return None

    def _keep_told(self, slot: int) -> None:
        while not self._ended.wait(_ASK_SECONDS):
            with suppress(OSError, EOFError), _reach(self._folder, slot) as worker:
                revision = -1
                while not self._ended.wait(_ASK_SECONDS):
                    told = self._told
                    if told is not None and told[0] != revision:
                        revision = told[0]
                        self._statuses[slot] = _ask(worker, *told)
                    else:
                        self._statuses[slot] = _ask(worker)


def _reach(folder: Path, slot: int) -> Connection:
    return Client(str(folder / str(slot)), "AF_UNIX")


def _ask(worker: Connection, *words: object) -> Any:
    worker.send(words)
    if not worker.poll(_ANSWER_SECONDS):
        raise EOFError("no answer")
    return worker.recv()


def _listen(worker: Worker, folder: Path, slot: int) -> None:
    """In the place of whoever listened before."""
    path = folder / str(slot)
    mine = folder / f"{slot}-{os.getpid()}"
    listener = Listener(str(mine), "AF_UNIX", backlog=_BACKLOG)
    mine.rename(path)

    def answer(asking: Connection) -> None:
        with suppress(OSError, EOFError):
            while True:
                match asking.recv():
                    case (int() as revision, Orders() as orders):
                        worker.follow(revision, orders)
                        asking.send(worker.status())
                    case (epoch, task, number, commit):
                        asking.send(worker.share(epoch, task, number, commit))
                    case _:
                        asking.send(worker.status())

    def accept() -> None:
        while True:
            with suppress(OSError, EOFError):
                threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _run(work: Callable[[], None]) -> None:
    try:
        work()
    except Deposed as error:
        logging.error("deposed: %s", error)
        os._exit(DEPOSED)
    except STORE_FAILURES as error:
        logging.error("ended by the store: %s", error)
        os._exit(STORE_ENDED_IT)
    except AggregatorError as error:
        # A store that is away at the start is told in the product's words.
        if not isinstance(error.__context__, (*STORE_FAILURES, *_driver_errors())):
            logging.exception("ended by a defect")
            os._exit(DEFECT)
        logging.error("could not start: %s", error)
        os._exit(STORE_ENDED_IT)
    except BaseException:
        logging.exception("ended by a defect")
        os._exit(DEFECT)


def _driver_errors() -> tuple[type[BaseException], ...]:
    with suppress(ImportError):
        import psycopg

        return (sqlite3.Error, psycopg.Error)
    return (sqlite3.Error,)


def _log_to(path: str) -> None:
    shorten_settling()
    logging.raiseExceptions = False  # the log's disk is full now and then, too
    line = f"%(asctime)s {os.getpid()} %(levelname)s %(message)s"
    logging.basicConfig(filename=path, level=logging.INFO, format=line, force=True)
