"""One run: a fleet is served, all open sessions, rounds go by, a worker is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from aggregator.publish.mirror import is_chunk
from benchmarks.aggregator.fleet import ML1M, Shape
from benchmarks.aggregator.load import RoundSeen, spread_by_second
from benchmarks.cluster.processes import Usage, between
from benchmarks.cluster.serving import Served, Setup, served
from device_sdk.wire.codec.message import MessageType

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
