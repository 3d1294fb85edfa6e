"""A cluster on this machine without Ray: workers as threads, or as processes to be killed."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from aggregator.cluster.coordinator import Coordinating, Crew, posts
from aggregator.cluster.orders import Orders, Post
from aggregator.cluster.worker import Worker, WorkerStatus, run_on_thread
from aggregator.home import AggregatorHome
from aggregator.serve.assembly import World, assemble
from aggregator.store.roles import grant_worker
from aggregator.store.rows import ShareRow
from aggregator.task.cluster import Cluster
from aggregator.task.file import read_task
from tests.fakes.homes import Serving
from tests.fakes.threads import on_thread
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.servers.postgres import USER

_ROLE = "workers"


def world(seed: int = 3) -> World:
    return World(time.monotonic, time.time, np.random.default_rng(seed), os.urandom)


class Threads:
    """Workers as objects of this process."""

    def __init__(self, posts: Sequence[Post]) -> None:
        self.errors: list[BaseException] = []
        self.fetched = 0
        """States that came from workers, and not from the store."""
        self._running = 0
        self._start(posts)

    def _start(self, posts: Sequence[Post]) -> None:
        self.posts = [*posts]
        self.workers = [Worker(post, world(post.slot.number + 10)) for post in posts]
        self._told: dict[int, int] = {}
        self._running = len(self.workers)
        self._stopping = [run_on_thread(each, self._ended) for each in self.workers]

    def post(self, posts: Sequence[Post]) -> None:
        if self.posts != [*posts]:
            self.stop()
            self._start(posts)

    def tend(self, revision: int, orders: Orders) -> None:
        for number, worker in enumerate(self.workers):
            if self._told.get(number) != revision:
                self._told[number] = revision
                worker.follow(revision, orders)

    def statuses(self) -> list[WorkerStatus]:
        return [each.status() for each in self.workers]

    def shares(self, task: int, rows: Sequence[ShareRow]) -> list[bytes | None]:
        found = []
        for row in rows:
            worker = self.workers[row.slot]
            found.append(worker.share(row.epoch, task, row.round, row.commits))
        self.fetched += sum(each is not None for each in found)
        return found

    def leave(self) -> None:
        self.stop()

    def connected(self) -> bool:
        return all(each.connected for each in self.statuses())

    def stop(self) -> None:
        for each in self._stopping:
            each.set()
        wait_until(lambda: self._running == 0, lambda: "workers go on")

    def _ended(self, error: BaseException | None) -> None:
        self._running -= 1
        if error is not None:
            self.errors.append(error)


class WorkerProcess:
    """A worker in a process of its own; it gets its orders by a pipe."""

    def __init__(self, post: Post, log: Path) -> None:
        self.post, self._log = post, log
        self.told = -1
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.worker_process"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        self.told = -1
        self._send(self.post)

    def follow(self, revision: int, orders: Orders) -> None:
        self.told = revision
        self._send((revision, orders))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait(PATIENCE_SECONDS)

    def _send(self, what: object) -> None:
        packed = pickle.dumps(what)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(packed).to_bytes(8, "big") + packed)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass


class Processes:
    """Workers as processes; those that were killed are started again unless told otherwise."""

    def __init__(self, posts: Sequence[Post], folder: Path) -> None:
        self.log = folder / "workers.log"
        self.workers = [WorkerProcess(post, self.log) for post in posts]
        self.restarts = True

    def tend(self, revision: int, orders: Orders) -> None:
        for worker in self.workers:
            if worker.ended() is not None and self.restarts:
                worker.start()
            if worker.told != revision and worker.ended() is None:
                worker.follow(revision, orders)

    def statuses(self) -> list[WorkerStatus]:
        return []

    def connected(self) -> bool:
        """Once each."""
        return self.log.read_text().count("connected to") >= len(self.workers)

    def shares(self, task: int, rows: Sequence[ShareRow]) -> list[bytes | None]:
        """The store has them."""
        return [None] * len(rows)

    def leave(self) -> None:
        """They end by themselves: nobody tells them anything more."""

    def stop(self) -> None:
        for worker in self.workers:
            worker.signal(signal.SIGCONT)
            worker.signal(signal.SIGTERM)
        for worker in self.workers:
            worker.wait()


@dataclass(kw_only=True)
class Coordinated(Serving):
    """A coordinator on a thread of its own."""

    runtime: Threads | Processes


def _as_workers(home: AggregatorHome) -> str:
    """The URL of a home's database for a role that may do what workers need."""
    assert home.store_url is not None
    store = home.open_store()
    database = store.database
    with database.transaction():
        if database.row("SELECT 1 FROM pg_roles WHERE rolname = ?", (_ROLE,)) is None:
            database.execute(f"CREATE ROLE {_ROLE} LOGIN")
    grant_worker(database, _ROLE)
    database.close()
    return home.store_url.replace(f"{USER}@", f"{_ROLE}@")


@contextmanager
def coordinated(
    home: AggregatorHome, cluster: Cluster, *, processes: bool = False
) -> Iterator[Coordinated]:
    """Coordinate a home in this process, with its workers, until the block ends. Where its store is
    a database, they reach it as a role of their own."""
    if home.store_url is not None and cluster.worker_store is None:
        cluster = replace(cluster, worker_store=_as_workers(home))

    def coordinate(ready: Callable[[Coordinated], None], stopping: Callable[[], bool]) -> None:
        task, store = read_task(home.task_file), home.open_store()
        role = Coordinating(cluster)
        parts = assemble(home, store, task, world(), role=role)
        where = posts(home, store, cluster, task.fleet)
        runtime = Processes(where, home.folder) if processes else Threads(where)
        role.fetch = runtime.shares
        running = Coordinated(parts=parts, runtime=runtime)
        crew = Crew(runtime, home, parts)
        parts.link.start()
        ready(running)
        try:
            running.service.run(stopping, crew.tend)
        finally:
            runtime.stop()
            running.service.stop()
        for error in runtime.errors if isinstance(runtime, Threads) else []:
            raise error

    with on_thread(coordinate) as running:
        wait_until(running.runtime.connected, lambda: "workers do not connect")
        yield running
