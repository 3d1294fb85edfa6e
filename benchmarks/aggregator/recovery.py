"""How soon an aggregator that was killed with many accepted updates in its round is back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.rounds.machine import RoundOpened
from aggregator.serve.assembly import World, assemble
from aggregator.task.file import read_task
from benchmarks.aggregator.broker import running_mosquitto
from benchmarks.aggregator.fleet import enrol_directly, make_bench_home, scatter_body
from device_sdk.wire.publish.receipts import UpdateIdentity, Verdict, write_update

_GROUP = 256
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class RecoveryFigures:
    """``seconds``: from the start of the process to its connection to the broker, median of
    ``runs``; the state is whole by then. ``behind``: updates since the last checkpoint."""

    updates: int
    behind: int
    seconds: float
    slowest_seconds: float
    runs: int


def measure_recovery(updates: int, runs: int, folder: Path) -> RecoveryFigures:
    """Commit ``updates`` to an open round, end without a word, and time ``serve``'s return.

    The process is killed with -9 after each time, so every start finds the same round.
    """
    with running_mosquitto(folder) as broker:
        lines = f"quorum = {2 * updates}\nwait_for_devices = 1\ndeadline_seconds = 86400.0"
        home = make_bench_home(folder / "home", broker.url(), lines)
        behind = _fill(home_folder=folder / "home", updates=updates)
        seconds = [_time_start(folder / "home", folder / f"serve-{n}.log") for n in range(runs)]
    shutil.rmtree(home.folder)
    return RecoveryFigures(updates, behind, float(np.median(seconds)), max(seconds), runs)


def _fill(home_folder: Path, updates: int) -> int:
    from aggregator.home import AggregatorHome

    home = AggregatorHome(home_folder)
    store = home.open_store()
    rng = np.random.default_rng(2)
    devices = enrol_directly(store, updates + 1, rng)
    world = World(time.monotonic, time.time, rng)
    parts = assemble(home, store, read_task(home.task_file), world)
    opened = parts.first.rounds.tick()
    if not isinstance(opened, RoundOpened):
        raise RuntimeError("the round did not open")
    row = opened.row
    bodies = [scatter_body(rng) for _ in range(64)]
    counted = 0
    for start in range(0, updates, _GROUP):
        for index in range(start, min(start + _GROUP, updates)):
            device_id = devices[index].credential.device_id
            identity = UpdateIdentity(device_id, "default", row.generation, row.round)
            parts.inbox.offer(device_id, write_update(identity, bodies[index % len(bodies)]))
        counted += sum(s.receipt.verdict is Verdict.COUNTED for s in parts.first.ingest.commit())
    if counted != updates:
        raise RuntimeError(f"{counted} of {updates} updates were counted")
    partial = store.first.checkpoints.get("partial")
    behind = updates - (0 if partial is None else partial.seq)
    store.database.close()
    return behind


def _time_start(home: Path, log: Path) -> float:
    command = [sys.executable, "-m", "aggregator.cli", "serve", "--home", str(home)]
    with log.open("wb") as out:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ))
        while b"connected to" not in log.read_bytes():
            if process.poll() is not None or time.perf_counter() - began > _PATIENCE_SECONDS:
                process.kill()
                raise RuntimeError(f"serve did not come back: {log.read_text()}")
            time.sleep(0.005)
        seconds = time.perf_counter() - began
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    return seconds
