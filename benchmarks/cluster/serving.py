"""A fleet that is served as the product serves it: ``serve``, alone or with workers under Ray."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.home import AggregatorHome
from aggregator.keys.folder import current_descriptor
from aggregator.store import Store
from benchmarks.aggregator.broker import running_mosquitto
from benchmarks.aggregator.fleet import Shape, enrol_directly, make_bench_home, scatter_body
from benchmarks.aggregator.load import Load
from benchmarks.aggregator.serving import running_aggregator
from benchmarks.cluster.processes import Meter

_BODIES = 64
_DAY_SECONDS = 86_400


@dataclass(frozen=True)
class Setup:
    """``workers`` 0: one process does everything. ``store``: ``sqlite`` or ``postgres``."""

    workers: int
    store: str = "sqlite"

    def __str__(self) -> str:
        engine = {"sqlite": "SQLite", "postgres": "PostgreSQL"}[self.store]
        if not self.workers:
            return f"one process, {engine}"
        return f"{self.workers} worker{'s' * (self.workers > 1)}, {engine}"


@dataclass(frozen=True)
class Served:
    """A load whose devices have no sessions yet. ``store`` is for looking."""

    load: Load
    meter: Meter
    store: Store

    def log_bytes(self) -> float:
        """Bytes that PostgreSQL has written to its log; 0 with SQLite."""
        if not self.store.database.identity:
            return 0.0
        row = self.store.database.row("SELECT (pg_current_wal_lsn() - '0/0')::float8")
        return 0.0 if row is None else float(row[0])


@contextmanager
def served(
    setup: Setup,
    devices: int,
    shape: Shape,
    *,
    postgres: str | None,
    connections: int,
    window: int,
) -> Iterator[Served]:
    """``postgres``: the URL of a server's database in which another may be made. What escapes from
    inside carries the end of the aggregator's log."""
    rng = np.random.default_rng(4)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        broker = stack.enter_context(running_mosquitto(folder))
        url, server = None, 0
        if setup.store == "postgres":
            if postgres is None:
                raise ValueError("a store in PostgreSQL needs the URL of a server")
            url, server = stack.enter_context(_database(postgres))
        settings = _settings(setup, devices, url)
        home = make_bench_home(folder / "home", broker.url(), settings, shape)
        store = home.open_store()
        fleet = enrol_directly(store, devices, rng)
        descriptor = current_descriptor(store)
        store.database.close()
        if url is not None:
            home = AggregatorHome(home.folder, url)
            home.move_store()
        store = home.open_store()
        stack.callback(store.database.close)
        log = folder / "serve.log"
        options = ("--plain", "--cluster", "ray", "--local") if setup.workers else ()
        process = stack.enter_context(
            running_aggregator(home, log, options, connections=1 + setup.workers)
        )
        bodies = [scatter_body(rng, shape) for _ in range(_BODIES)]
        load = Load(broker.port, fleet, bodies, descriptor, connections=connections, window=window)
        with closing(load):
            yield Served(load, Meter(process.pid, broker.pid, server), store)


def _settings(setup: Setup, devices: int, url: str | None) -> str:
    lines = [f"quorum = {devices}", f"deadline_seconds = {_DAY_SECONDS}.0"]
    if setup.workers or url:
        lines += ["[cluster]", f"workers = {max(setup.workers, 1)}"]
    if url:
        lines.append(f'store = "{url}"')
    return "\n".join(lines)


@contextmanager
def _database(url: str) -> Iterator[tuple[str, int]]:
    """A database of one's own, and the process id of its server, which runs on this machine."""
    import psycopg  # of the extra `cluster`

    name = f"bench_{os.getpid()}_{time.monotonic_ns()}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        backend = connection.info.backend_pid
        stat = Path(f"/proc/{backend}/stat").read_text()
        server = int(stat.rsplit(")", 1)[1].split()[1])
        try:
            yield f"{url.rsplit('/', 1)[0]}/{name}", server
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
