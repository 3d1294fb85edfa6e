"""`make bench-cluster`: what a worker, a coordinator and a device cost, on this machine.

Fleets of virtual devices send sealed updates to `tessera-aggregator serve`, alone and with workers
under Ray, over a real Mosquitto. The rows take turns. The devices share a few MQTT connections; all
else of them is each one's own.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# One BLAS thread: before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.aggregator.broker import MOSQUITTO
from benchmarks.cluster.connections import ConnectionFigures, measure_connections
from benchmarks.cluster.experiment import TINY, ClusterOutcome, ClusterRun, Setup, Storm, execute
from benchmarks.cluster.processes import KINDS
from benchmarks.harness import (
    StoredRuns,
    add_store_options,
    markdown_table,
    progress_line,
    suite_parser,
)

SETUPS = (
    Setup(0),
    Setup(1),
    Setup(2),
    Setup(1, "postgres"),
    Setup(2, "postgres"),
)
DEVICES, ROUNDS, REPEATS = 1500, 4, 3
MANY = ClusterRun(Setup(4, "postgres"), 100_000, 4, shape=TINY, connections=64)
EPILOG = """\
PostgreSQL's rows need a server on this machine, and the right to make databases there:
  make bench-cluster ARGS='--postgres postgresql://user@127.0.0.1:5432/postgres'
100,000 devices through 4 workers (half an hour, and 2 GB of memory):
  make bench-cluster ARGS='--postgres URL --many'
docs/scale.md is made of what is stored:
  python -m benchmarks.cluster.scale --write
"""


@dataclass(frozen=True)
class ConnectionsRun:
    connections: int = 8000
    chunks: int = 10
    chunk_bytes: int = 48_000
    downloads: int = 200


CONNECTIONS = ConnectionsRun()


def runs_of(
    devices: int = DEVICES, rounds: int = ROUNDS, repeats: int = REPEATS
) -> list[ClusterRun]:
    """By turns: each repeat has every row."""
    return [
        ClusterRun(each, devices, rounds, repeat) for repeat in range(repeats) for each in SETUPS
    ]


def stored_runs(folder: Path) -> StoredRuns[ClusterRun, ClusterOutcome]:
    return StoredRuns(folder, "cluster", ClusterOutcome)


def stored_connections(folder: Path) -> StoredRuns[ConnectionsRun, ConnectionFigures]:
    return StoredRuns(folder, "cluster_connections", ConnectionFigures)


def main() -> int:
    """Run what is not stored yet; print the tables."""
    parser = suite_parser("cluster", __doc__ or "", EPILOG)
    parser.add_argument("--postgres", metavar="URL", help="of a server on this machine")
    parser.add_argument("--devices", type=int, default=DEVICES, help=f"of a row ({DEVICES})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"that are measured ({ROUNDS})")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"of each row ({REPEATS})")
    parser.add_argument("--many", action="store_true", help="the fleet of 100,000, too")
    add_store_options(parser)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if MOSQUITTO is None:
        print("mosquitto is not installed (apt-get install mosquitto)", file=sys.stderr)
        return 2
    store = stored_runs(options.results)
    runs = runs_of(options.devices, options.rounds, options.repeats)
    wanted = runs if not options.many else [*runs, MANY]
    for run in [] if options.table_only else wanted:
        if run.setup.store == "postgres" and options.postgres is None:
            continue
        with progress_line(f"{run.setup}, {run.devices:,} devices, {run.repeat}") as show:
            store.found_or_made(run, partial(execute, run, options.postgres, show))
    make = None if options.table_only else lambda: _measure(CONNECTIONS)
    connections = stored_connections(options.results).found_or_made(CONNECTIONS, make)
    print("\n\n".join(tables(store, runs, connections)))
    return 0


def _measure(run: ConnectionsRun) -> ConnectionFigures:
    return measure_connections(run.connections, run.chunks, run.chunk_bytes, run.downloads)


def tables(
    store: StoredRuns[ClusterRun, ClusterOutcome],
    runs: Sequence[ClusterRun],
    connections: ConnectionFigures | None,
) -> Iterator[str]:
    """Those of what is stored."""
    found: dict[Setup, list[ClusterOutcome]] = {}
    for run in runs:
        outcome = store.load(run)
        if outcome is not None:
            found.setdefault(run.setup, []).append(outcome)
    yield "Processor time an update, us: least, median and most of the runs.\n\n" + _by_kind(
        found, lambda outcome: outcome.update_micros
    )
    yield "Processor time an open, us.\n\n" + _by_kind(found, lambda outcome: outcome.open_micros)
    yield "The whole of a row.\n\n" + markdown_table(
        [
            (
                setup,
                len(outcomes),
                _three([_rate(each, runs) for each in outcomes], "{:,.0f}"),
                _three([1000 * each.alone_seconds for each in outcomes], "{:.1f}"),
                _three([_stored_bytes(each) for each in outcomes], "{:,.0f}"),
                _three([each.megabytes[-1].get("worker", 0) for each in outcomes], "{:.0f}"),
                _three([each.megabytes[-1]["aggregator"] for each in outcomes], "{:.0f}"),
                _three([each.load_average for each in outcomes], "{:.1f}"),
            )
            for setup, outcomes in found.items()
        ],
        (
            "served by",
            "runs",
            "updates a second",
            "ms to a receipt, alone",
            "bytes stored an update",
            "MB of workers",
            "MB of the coordinator",
            "load average",
        ),
    )
    storms = [
        (
            setup,
            sum(storm.opens),
            max(storm.opens, default=0),
            storm.opened(0.5),
            storm.opened(0.95),
            len(storm.opens),
            f"{storm.seconds:.1f}",
        )
        for setup, outcomes in found.items()
        for outcome in outcomes
        for storm in outcome.storms
    ]
    yield "A worker is killed as the next round's updates leave.\n\n" + markdown_table(
        storms,
        (
            "served by",
            "sessions opened anew",
            "most in a second",
            "s until half of them",
            "s until 95 %",
            "s until the last",
            "s until all receipts",
        ),
    )
    many = store.load(MANY)
    if many is not None:
        yield _many(many)
    if connections is not None:
        yield "\n".join(
            f"{name}: {value:,.0f}"
            for name, value in (
                ("idle connections without TLS", connections.connections),
                ("the broker's bytes for each", connections.broker_bytes),
                ("its processor time to connect and subscribe, us", connections.connect_micros),
                ("a download, bytes", connections.chunk_bytes),
                ("  of the broker, on the wire", connections.broker_download_bytes),
                ("  its processor time, us", connections.download_micros),
                ("  of a web server, on the wire", connections.http_download_bytes),
            )
        )


def _many(outcome: ClusterOutcome) -> str:
    head = (
        f"{MANY.devices:,} virtual devices over {MANY.connections} connections, {MANY.setup}: all "
        f"sessions in {outcome.open_seconds:.0f} s"
    )
    rounds = markdown_table(
        [
            (
                each.round,
                f"{each.seconds:.0f}",
                f"{each.whole_seconds:.0f}",
                f"{MANY.devices / each.seconds:,.0f}",
                each.resent,
            )
            for each in outcome.rounds
        ],
        (
            "round",
            "s to all receipts",
            "s with the next one's opening",
            "updates a second",
            "resent",
        ),
    )
    memory = markdown_table(
        [
            (when, *(f"{each.get(kind, 0):.0f}" for kind in KINDS))
            for when, each in zip(
                ("no sessions", "sessions", *(f"round {n + 1}" for n in range(99))),
                outcome.megabytes,
                strict=False,
            )
        ],
        ("MB", *KINDS),
    )
    costs = markdown_table(
        [
            (what, *(f"{micros.get(kind, 0):.0f}" for kind in KINDS))
            for what, micros in (("open", outcome.open_micros), ("update", outcome.update_micros))
        ],
        ("us of processor", *KINDS),
    )
    after = "\n".join(_told(storm) for storm in outcome.storms)
    return "\n\n".join(each for each in (head, rounds, memory, costs, after) if each)


def _told(storm: Storm) -> str:
    answered = ""
    if storm.answered:
        half, most, last = storm.answered
        answered = f", their receipts after {half:.0f}, {most:.0f} and {last:.0f} s"
    return (
        f"A worker is killed: {sum(storm.opens):,} sessions are opened anew, at most "
        f"{max(storm.opens, default=0):,} in a second, half after {storm.opened(0.5)} s, 95 % "
        f"after {storm.opened(0.95)} s, the last after {len(storm.opens)} s{answered}; all "
        f"receipts are there after {storm.seconds:.0f} s."
    )


def _rate(outcome: ClusterOutcome, runs: Sequence[ClusterRun]) -> float:
    return runs[0].devices / float(np.median([each.seconds for each in outcome.rounds]))


def _stored_bytes(outcome: ClusterOutcome) -> float:
    """SQLite's files, or PostgreSQL's log."""
    written = outcome.written_bytes
    return outcome.log_bytes or written.get("worker", 0) + written["aggregator"]


def _by_kind(
    found: dict[Setup, list[ClusterOutcome]],
    micros: Callable[[ClusterOutcome], dict[str, float]],
) -> str:
    return markdown_table(
        [
            (
                setup,
                *(
                    _three([micros(each).get(kind, 0) for each in outcomes], "{:.0f}")
                    for kind in KINDS
                ),
            )
            for setup, outcomes in found.items()
        ],
        ("served by", *KINDS),
    )


def _three(values: Sequence[float], form: str) -> str:
    """Least, median, most."""
    if not any(values):
        return ""
    return " / ".join(form.format(float(each)) for each in np.quantile(values, (0, 0.5, 1)))


if __name__ == "__main__":
    sys.exit(main())
