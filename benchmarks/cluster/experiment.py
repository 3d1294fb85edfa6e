"""A fleet served as the product serves it; one run of it: rounds go by, a worker is killed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.home import AggregatorHome
from aggregator.keys.folder import current_descriptor
from aggregator.publish.mirror import is_chunk
from aggregator.store import Store
from benchmarks.aggregator.broker import running_mosquitto
from benchmarks.aggregator.fleet import ML1M, Shape, enrol_directly, make_bench_home, scatter_body
from benchmarks.aggregator.load import Load, RoundSeen, spread_by_second
from benchmarks.aggregator.serving import running_aggregator
from benchmarks.cluster.processes import Meter, Usage, between
from device_sdk.wire.codec.message import MessageType

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


TINY = Shape(256, 8, 8, 4)
_ALONE = 40


@dataclass(frozen=True)
class ClusterRun:
    """``rounds`` are measured, after one that warms up. ``repeat`` numbers runs of equal settings.
    ``kill``: a worker is killed when the next round's updates are ready."""

    setup: Setup
    devices: int
    rounds: int
    repeat: int = 0
    shape: Shape = ML1M
    connections: int = 16
    window: int = 4000
    kill: bool = True


@dataclass(frozen=True)
class RoundFigures:
    """``seconds``: from the first update to the last receipt; ``whole_seconds``: to the moment at
    which the next round's updates are ready. Of receipts in seconds: ``median``, ``late`` (p99)."""

    round: int
    seconds: float
    whole_seconds: float
    median: float
    late: float
    resent: int


@dataclass(frozen=True)
class Storm:
    """What came of a killed worker's devices. ``opens``: sessions in each second from the kill on.
    ``seconds``: until every device of the fleet had its receipt. ``answered``: until half of the
    devices that had to open another session, 95 % and all of them had theirs."""

    opens: list[int]
    seconds: float
    resent: int
    answered: tuple[float, ...] = ()

    def opened(self, share: float) -> int:
        """In which second that share of the sessions was there."""
        return int(np.searchsorted(np.cumsum(self.opens), share * sum(self.opens))) + 1


@dataclass(frozen=True)
class ClusterOutcome:
    """Figures by kind of process are those of :mod:`benchmarks.cluster.processes`.

    Attributes:
        load_average: of the machine, when the run began: others use it too.
        open_seconds: in which all devices opened a session.
        open_micros: of processor time for each open, by kind.
        update_micros: the same for each update, over whole rounds.
        written_bytes: to files, for each update, by kind.
        log_bytes: of PostgreSQL's write-ahead log, for each update.
        megabytes: in memory, by kind: without sessions, with them, and after each round,
            with the one before and the one behind those that are measured.
        alone_seconds: median time to a receipt of updates that are sent one after the other.
        manifest_bytes, chunk_bytes, chunks: what a device downloads in a round.
        storms: one, where a worker was killed.
    """

    load_average: float
    open_seconds: float
    open_micros: dict[str, float]
    update_micros: dict[str, float]
    written_bytes: dict[str, float]
    log_bytes: float
    megabytes: list[dict[str, float]]
    rounds: list[RoundFigures]
    alone_seconds: float
    manifest_bytes: int
    chunk_bytes: int
    chunks: int
    storms: list[Storm]


def execute(
    run: ClusterRun, postgres: str | None, show: Callable[[str], None] = lambda text: None
) -> ClusterOutcome:
    """``postgres``: see :func:`served`."""
    load_average = os.getloadavg()[0]
    with served(
        run.setup,
        run.devices,
        run.shape,
        postgres=postgres,
        connections=run.connections,
        window=run.window,
    ) as fleet:
        show("devices open their sessions")
        memory = [_megabytes(fleet)]
        before = fleet.meter.read()
        open_seconds = fleet.load.open_sessions()
        opens = between(before, fleet.meter.read())
        memory.append(_megabytes(fleet))
        fleet.load.round()
        memory.append(_megabytes(fleet))
        seen: list[RoundSeen] = []
        marks: list[_Mark] = []
        for number in range(run.rounds):
            show(f"round {number + 1} of {run.rounds}")
            seen.append(fleet.load.round(lambda: marks.append(_Mark.of(fleet))))
            memory.append(_megabytes(fleet))
        alone = fleet.load.round(lambda: marks.append(_Mark.of(fleet)), min(_ALONE, run.devices))
        memory.append(_megabytes(fleet))
        used = between(marks[0].used, marks[-1].used)
        updates = run.devices * run.rounds
        manifest, chunks = _downloads(fleet)
        show("a worker is killed" if run.kill and run.setup.workers else "done")
        return ClusterOutcome(
            load_average,
            open_seconds,
            _each(opens.seconds, run.devices, 1e6),
            _each(used.seconds, updates, 1e6),
            _each(used.written, updates, 1.0),
            (marks[-1].log_bytes - marks[0].log_bytes) / updates,
            memory,
            [
                RoundFigures(
                    one.round,
                    one.seconds,
                    marks[place + 1].seconds - marks[place].seconds,
                    float(np.median(one.latencies)),
                    float(np.quantile(one.latencies, 0.99)),
                    one.resent,
                )
                for place, one in enumerate(seen)
            ],
            float(np.median(alone.latencies[: min(_ALONE, run.devices)])),
            manifest,
            sum(chunks),
            len(chunks),
            [_storm(fleet)] if run.kill and run.setup.workers else [],
        )


@dataclass(frozen=True)
class _Mark:
    seconds: float
    log_bytes: float
    used: dict[int, tuple[str, float, float, float]]

    @classmethod
    def of(cls, fleet: Served) -> _Mark:
        return cls(time.monotonic(), fleet.log_bytes(), fleet.meter.read())


def _storm(fleet: Served) -> Storm:
    seen = fleet.load.round(lambda: os.kill(fleet.meter.workers()[0], signal.SIGKILL))
    answered = np.quantile(seen.reopened or (0.0,), (0.5, 0.95, 1.0)).round(1).tolist()
    return Storm(spread_by_second(seen.opened_at), seen.seconds, seen.resent, tuple(answered))


def _megabytes(fleet: Served) -> dict[str, float]:
    read = fleet.meter.read(memory=True)
    usage: Usage = between({}, read)
    return {kind: round(value, 1) for kind, value in usage.megabytes.items()}


def _each(totals: Mapping[str, float], count: int, times: float) -> dict[str, float]:
    return {kind: round(total * times / count, 2) for kind, total in totals.items()}


def _downloads(fleet: Served) -> tuple[int, list[int]]:
    """Bytes of the manifest, and of the chunks that it names, as they are retained."""
    found = [fleet.store.retained.message(topic) for topic in fleet.store.retained.topics()]
    messages = [message for message in found if message is not None]
    chunks = [len(message) for message in messages if is_chunk(message)]
    manifest = [
        len(message) for message in messages if message[1:2] == bytes((MessageType.MANIFEST,))
    ]
    return sum(manifest), chunks
