"""`python -m benchmarks.aggregator.stores --url URL`: what a worker's group costs on each engine.

A group is 1,000 verdicts and participations and one row of sums of 2 MB, in one transaction that is
on disk when it ends. The engines take turns, group by group; ``URL`` names an empty database on
this machine. Printed are medians: wall time, this process's processor time, and the bytes that
PostgreSQL writes to its log.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tabulate import tabulate

from aggregator.store import Store, create_database
from aggregator.store.rows import LastParticipation, StoredCheckpoint, StoredVerdict

ROWS, SUMS_BYTES = 1000, 2_000_000
PARTS = {"rows": (True, False), "sums": (False, True), "both": (True, True)}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.aggregator.stores", description=__doc__
    )
    parser.add_argument("--url", required=True, help="an empty PostgreSQL database")
    parser.add_argument("--groups", type=int, default=20, help="of each kind (20)")
    arguments = parser.parse_args()
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        stores = {
            "SQLite": Store(create_database(Path(folder) / "store.sqlite")),
            "PostgreSQL": Store(create_database(arguments.url)),
        }
        found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for number in range(arguments.groups + 1):
            for part, (rows, sums) in PARTS.items():
                for name, store in stores.items():
                    costs = _group(store, rng, number, rows=rows, sums=sums)
                    if number:  # the first one warms up
                        found.setdefault((part, name), []).append(costs)
        for store in stores.values():
            store.database.close()
    lines = []
    for (part, name), costs in found.items():
        wall, processor, log = (statistics.median(each) for each in zip(*costs, strict=True))
        written = f"{log / 1e6:.2f}" if log else "-"
        lines.append((part, name, f"{1000 * wall:.1f}", f"{1000 * processor:.1f}", written))
    print(tabulate(lines, ("group of", "store", "ms", "ms of processor", "MB of log")))
    return 0


def _group(
    store: Store, rng: np.random.Generator, number: int, *, rows: bool, sums: bool
) -> tuple[float, float, float]:
    ids = [rng.bytes(32) for _ in range(ROWS)]
    verdicts = [StoredVerdict(1, number, each, each, None) for each in ids]
    seen = {each: LastParticipation(1, 16, 1, number, bytes(120)) for each in ids}
    state = rng.bytes(SUMS_BYTES)
    before = _log_bytes(store)
    wall, processor = time.perf_counter(), time.process_time()
    with store.database.transaction(shared=True):
        if rows:
            store.first.log.append([], verdicts)
            store.first.participations.note(seen)
        if sums:
            row = {"task": 1, **StoredCheckpoint("partial", 1, 1, 1, state)._asdict()}
            store.database.insert("checkpoints", row, replace=True)
    costs = time.perf_counter() - wall, time.process_time() - processor
    return *costs, _log_bytes(store) - before


def _log_bytes(store: Store) -> float:
    if not store.database.identity:
        return 0.0
    row = store.database.row("SELECT (pg_current_wal_lsn() - '0/0')::float8")
    return 0.0 if row is None else float(row[0])


if __name__ == "__main__":
    sys.exit(main())
