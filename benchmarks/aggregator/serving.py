"""A broker, a serving aggregator, and a load of enrolled devices connected to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.home import AggregatorHome
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
_START_SECONDS = 180.0
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

    ``stop_seconds``: see :func:`running_aggregator`. ``settings``, ``guarded``: the broker's, see
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
        log = folder / "serve.log"
        with running_aggregator(home, log, stop_seconds=stop_seconds) as process:
            bodies = [scatter_body(rng) for _ in range(64)]
            account = broker.account("devices")
            load = Load(broker.port, fleet, bodies, descriptor, account=account)
            with closing(load):
                yield Served(broker, process.pid, fleet, idler, load)


@contextmanager
def running_aggregator(
    home: AggregatorHome,
    log: Path,
    options: Sequence[str] = (),
    *,
    connections: int = 1,
    stop_seconds: float = 120,
) -> Iterator[subprocess.Popen[bytes]]:
    """``serve`` in a process of its own, from when it, and its workers, have so many connections.

    It has ``stop_seconds`` to end after SIGTERM. What escapes from inside carries the end of its
    log.
    """
    command = [sys.executable, "-m", "aggregator.cli", "serve", "--home", str(home.folder)]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *options], stdout=file, stderr=file)
    try:
        until = time.monotonic() + _START_SECONDS
        while log.read_bytes().count(b"connected to") < connections:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the aggregator did not come up")
            time.sleep(0.05)
        yield process
    except Exception as error:
        error.add_note(f"serve's log: {log.read_text()[-3000:]}")
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(stop_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class BrokerFigures:
    """``cpu_seconds`` are the aggregator's."""

    devices: int
    updates: int
    seconds: float
    open_seconds: float
    cpu_seconds: float
    resent: int
    """Updates that were sent again for want of a receipt."""


def measure_through_broker(
    devices: int, rounds: int, folder: Path, *, settings: str = "recommended", rtt_ms: float = 0.0
) -> BrokerFigures:
    """Rounds in which each of ``devices`` sends one update and waits for its receipt.

    ``settings`` of the broker, and ``rtt_ms`` between it and the aggregator: see :func:`serving`.
    """
    with serving(devices, folder, settings=settings, rtt_ms=rtt_ms) as served:
        load = served.load
        open_seconds = load.open_sessions()
        load.run(devices)  # a round to warm up
        cpu = cpu_seconds(served.pid)
        seconds = load.run(devices * rounds)
        cpu = cpu_seconds(served.pid) - cpu
    return BrokerFigures(devices, devices * rounds, seconds, open_seconds, cpu, load.resent)


def cpu_seconds(pid: int) -> float:
    """Of all its threads since it started, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
