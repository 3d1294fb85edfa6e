"""500 connected devices through Mosquitto, the aggregator in a process of its own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.aggregator.serving import serving


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
        began = time.perf_counter()
        load.open_sessions()
        open_seconds = time.perf_counter() - began
        load.run(devices)  # a round to warm up
        cpu = cpu_seconds(served.pid)
        seconds = load.run(devices * rounds)
        cpu = cpu_seconds(served.pid) - cpu
    return BrokerFigures(devices, devices * rounds, seconds, open_seconds, cpu, load.resent)


def cpu_seconds(pid: int) -> float:
    """Of all its threads since it started, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
