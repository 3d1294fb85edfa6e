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

from aggregator.keys.folder import current_descriptor
from benchmarks.aggregator.broker import Broker, running_mosquitto
from benchmarks.aggregator.fleet import (
    BenchDevice,
    enrol_directly,
    make_bench_home,
    scatter_body,
)
from benchmarks.aggregator.latency import delayed
from benchmarks.aggregator.load import Load

_NEVER = 2**40
_START_SECONDS = 120.0
"""On a machine that has much else to do."""


@dataclass(frozen=True)
class Served:
    """``pid`` is the aggregator's. ``idler`` is enrolled, and no round selects it."""

    broker: Broker
    pid: int
    fleet: list[BenchDevice]
    idler: BenchDevice
    load: Load


@contextmanager
def serving(
    devices: int,
    folder: Path,
    stop_seconds: float = 20,
    *,
    settings: str = "recommended",
    guarded: bool = False,
    rtt_ms: float = 0.0,
) -> Iterator[Served]:
    """The aggregator has connected, the devices have not opened their sessions yet.

    The aggregator has ``stop_seconds`` to end after SIGTERM. What escapes from inside carries
    the end of the aggregator's log. ``settings``, ``guarded``: the broker's, see
    :func:`running_mosquitto`. ``rtt_ms``: between the aggregator and the broker.
    """
    rng = np.random.default_rng(4)
    with (
        running_mosquitto(folder, settings, guarded=guarded) as broker,
        delayed(broker.port, rtt_ms) as port,
    ):
        lines = f"quorum = {devices}\ndeadline_seconds = 600.0"
        home = make_bench_home(folder / "home", broker.url(port), lines)
        store = home.open_store()
        fleet = enrol_directly(store, devices, rng)
        (idler,) = enrol_directly(store, 1, rng, first_round=_NEVER)
        descriptor = current_descriptor(store)
        store.database.close()
        command = [sys.executable, "-m", "aggregator.cli", "serve", "--home", str(home.folder)]
        log = folder / "serve.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            bodies = [scatter_body(rng) for _ in range(64)]
            load = Load(broker.port, fleet, bodies, descriptor, rng, broker.account("devices"))
            _await_connection(log)
            yield Served(broker, process.pid, fleet, idler, load)
            load.close()
        except Exception as error:
            error.add_note(f"serve's log: {log.read_text()[-2000:]}")
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(stop_seconds)


def _await_connection(log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while b"connected to" not in log.read_bytes():
        if time.monotonic() > until:
            raise TimeoutError(f"the aggregator did not come up: {log.read_text()}")
        time.sleep(0.05)
