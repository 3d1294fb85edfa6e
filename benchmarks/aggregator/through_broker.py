"""500 connected devices through Mosquitto, the aggregator in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.aggregator.broker import running_mosquitto
from benchmarks.aggregator.fleet import enrol_directly, make_bench_home, scatter_body
from benchmarks.aggregator.load import Load
from device_sdk.wire.descriptor import read_descriptor

__all__ = ["BrokerFigures", "measure_through_broker"]


@dataclass(frozen=True)
class BrokerFigures:
    """``cpu_seconds`` are the aggregator's."""

    devices: int
    updates: int
    seconds: float
    open_seconds: float
    cpu_seconds: float


def measure_through_broker(devices: int, rounds: int, folder: Path) -> BrokerFigures:
    """Rounds in which each of ``devices`` sends one update and waits for its receipt."""
    rng = np.random.default_rng(4)
    with running_mosquitto(folder) as port:
        lines = f"quorum = {devices}\ndeadline_seconds = 600.0"
        home = make_bench_home(folder / "home", f"mqtt://127.0.0.1:{port}", lines)
        store = home.open_store()
        fleet = enrol_directly(store, devices, rng)
        issued = store.secrets.descriptors()[-1]
        descriptor = read_descriptor(issued.message, store.facts.root_fingerprint)
        store.database.close()
        command = [sys.executable, "-m", "aggregator.cli", "serve", "--home", str(home.folder)]
        with (folder / "serve.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            bodies = [scatter_body(rng) for _ in range(64)]
            load = Load(port, fleet, bodies, descriptor)
            _await_connection(folder / "serve.log")
            began = time.perf_counter()
            load.open_sessions()
            open_seconds = time.perf_counter() - began
            load.run(devices)  # a round to warm up
            cpu = _cpu_seconds(process.pid)
            seconds = load.run(devices * rounds)
            cpu = _cpu_seconds(process.pid) - cpu
            load.close()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
    return BrokerFigures(devices, devices * rounds, seconds, open_seconds, cpu)


def _await_connection(log: Path) -> None:
    until = time.monotonic() + 20
    while b"connected to" not in log.read_bytes():
        if time.monotonic() > until:
            raise TimeoutError(f"the aggregator did not come up: {log.read_text()}")
        time.sleep(0.05)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
