"""What the turn from one round to the next costs: `python -m benchmarks.aggregator.turn`.

A round of 50 updates is closed, its deleted updates erased, the next one opened and what that
replaced erased, without a broker: 3,706 x 64 with Adam, so 0.9 MB of a model and 2.8 MB of a state.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

# One BLAS thread: before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from tabulate import tabulate

from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.serve.assembly import World, assemble
from aggregator.task.file import read_task
from benchmarks.aggregator.fleet import enrol_directly, make_bench_home, scatter_body
from device_sdk.wire.publish.receipts import UpdateIdentity, write_update

_DEVICES, _WARM = 50, 5
_LINES = "quorum = 1\ndeadline_seconds = 86400.0"
Answer = TypeVar("Answer")


class _Watch:
    """Wall and processor seconds of what is done, by its name."""

    def __init__(self) -> None:
        self.took: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def of(self, name: str, work: Callable[[], Answer]) -> Answer:
        wall, processor = time.perf_counter(), time.process_time()
        answer = work()
        self.took[name].append((time.perf_counter() - wall, time.process_time() - processor))
        return answer


def measure_turns(rounds: int, folder: Path) -> tuple[dict[str, np.ndarray], int]:
    """Medians of wall and processor milliseconds by step, and the log's bytes after a close."""
    home = make_bench_home(folder, "mqtt://127.0.0.1:1", _LINES)
    store = home.open_store()
    rng = np.random.default_rng(2)
    devices = [each.credential.device_id for each in enrol_directly(store, _DEVICES, rng)]
    world = World(time.monotonic, time.time, rng)
    parts = assemble(home, store, read_task(home.task_file), world)
    bodies = [scatter_body(rng) for _ in devices]
    watch, logs = _Watch(), []
    for number in range(_WARM + rounds):
        if number == _WARM:
            watch.took.clear()
        opened = watch.of("open", parts.first.rounds.tick)
        assert isinstance(opened, RoundOpened)
        store.retained.cleared(store.retained.superseded())
        watch.of("erase after it", store.database.erase_deleted)
        row = opened.row
        for device_id, body in zip(devices, bodies, strict=True):
            identity = UpdateIdentity(device_id, "default", row.generation, row.round)
            assert parts.inbox.offer(device_id, write_update(identity, body)) is None
        assert len(parts.first.ingest.commit()) == _DEVICES
        closed = watch.of("close", parts.first.rounds.tick)
        assert isinstance(closed, RoundClosed)
        logs.append(Path(f"{home.database}-wal").stat().st_size)
        watch.of("erase after that", store.database.erase_deleted)
    store.database.close()
    found = {name: 1e3 * np.median(each, axis=0) for name, each in watch.took.items()}
    return found, int(np.median(logs))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aggregator.turn")
    parser.add_argument("--rounds", type=int, default=20, help="after 5 more (20)")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        found, log_bytes = measure_turns(arguments.rounds, Path(name) / "home")
    rows = [(name, *each) for name, each in found.items()]
    rows.append(("all", *sum(found.values())))  # type: ignore[arg-type]
    print(tabulate(rows, headers=("", "wall, ms", "processor, ms"), floatfmt=".1f"))
    print(f"\nSQLite's log after a close: {log_bytes / 1e6:.1f} MB. Load {os.getloadavg()[0]:.0f}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
