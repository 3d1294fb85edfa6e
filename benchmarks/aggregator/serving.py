"""A broker, a serving aggregator, and a load of enrolled devices connected to it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.key_folder import current_descriptor
from benchmarks.aggregator.broker import running_mosquitto
from benchmarks.aggregator.fleet import (
    BenchDevice,
    enrol_directly,
    make_bench_home,
    scatter_body,
)
from benchmarks.aggregator.load import Load

__all__ = ["Served", "serving"]


@dataclass(frozen=True)
class Served:
    """``pid`` is the aggregator's, ``port`` the broker's."""

    port: int
    pid: int
    fleet: list[BenchDevice]
    load: Load


@contextmanager
def serving(devices: int, folder: Path, stop_seconds: float = 20) -> Iterator[Served]:
    """The aggregator has connected, the devices have not opened their sessions yet.

    The aggregator has ``stop_seconds`` to end after SIGTERM. What escapes from inside carries
    the end of the aggregator's log.
    """
    rng = np.random.default_rng(4)
    with running_mosquitto(folder) as port:
        lines = f"quorum = {devices}\ndeadline_seconds = 600.0"
        home = make_bench_home(folder / "home", f"mqtt://127.0.0.1:{port}", lines)
        store = home.open_store()
        fleet = enrol_directly(store, devices, rng)
        descriptor = current_descriptor(store)
        store.database.close()
        command = [sys.executable, "-m", "aggregator.cli", "serve", "--home", str(home.folder)]
        log = folder / "serve.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            load = Load(port, fleet, [scatter_body(rng) for _ in range(64)], descriptor)
            _await_connection(log)
            yield Served(port, process.pid, fleet, load)
            load.close()
        except Exception as error:
            error.add_note(f"serve's log: {log.read_text()[-2000:]}")
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(stop_seconds)


def _await_connection(log: Path) -> None:
    until = time.monotonic() + 20
    while b"connected to" not in log.read_bytes():
        if time.monotonic() > until:
            raise TimeoutError(f"the aggregator did not come up: {log.read_text()}")
        time.sleep(0.05)
