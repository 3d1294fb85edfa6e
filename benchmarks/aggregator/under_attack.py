"""Honest updates a second while somebody floods the aggregator's topics, against without."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.aggregator.flood import FloodPlan
from benchmarks.aggregator.serving import Served, serving
from benchmarks.aggregator.through_broker import cpu_seconds
from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.topics import EnrolRequestTopic, Topics, UpTopic

KINDS: Mapping[str, str] = {
    "outside": "forged opens on the devices' topics, from without an account",
    "enrolment": "forged enrolment requests, from without an account",
    "insider": "forged opens from a device's account, on its own topic",
    "opens": "forged opens on the devices' topics, no access rules",
    "garbage": "garbage on the devices' topics, no access rules",
}
_UNGUARDED = ("opens", "garbage")
_SETTLE_SECONDS = 1.5
_PAYLOADS = 64


@dataclass(frozen=True)
class AttackFigures:
    """Updates a second with receipts. ``flood_rate``: messages a second that were really sent.

    ``cores``: how much of a core each process took while both ran.
    """

    kind: str
    unloaded: float
    loaded: float
    flood_rate: float
    resent: int
    cores: Mapping[str, float]

    @property
    def share(self) -> float:
        """Of the unloaded throughput."""
        return self.loaded / self.unloaded


def measure_under_attack(
    kind: str, rate: float, devices: int, rounds: int, folder: Path, settings: str = "recommended"
) -> AttackFigures:
    """``kind``: one of ``KINDS``, ``rate`` messages a second, at QoS 0. ``settings``: the broker's.

    Half of the unloaded rounds come before the flood and half after it. The loaded figure is of
    rounds that began after the flood had.
    """
    guarded = kind not in _UNGUARDED
    with serving(devices, folder, 60, settings=settings, guarded=guarded) as served:
        load = served.load
        load.open_sessions()
        load.run(devices)  # a round to warm up
        half = devices * -(-rounds // 2)
        unloaded_seconds = load.run(half)
        with _flood(served, _plan(kind, rate, served, folder), folder) as (sent, pid):
            time.sleep(_SETTLE_SECONDS)
            load.run(devices)  # the round that was open when the flood began
            pids = {
                "aggregator": served.pid,
                "broker": served.broker.pid,
                "fleet": os.getpid(),
                "flood": pid,
            }
            resent, before, began = load.resent, sent(), time.perf_counter()
            cpu = {name: cpu_seconds(pid) for name, pid in pids.items()}
            loaded = devices * rounds / load.run(devices * rounds)
            seconds = time.perf_counter() - began
            cores = {name: (cpu_seconds(pid) - cpu[name]) / seconds for name, pid in pids.items()}
            flood_rate = (sent() - before) / seconds
            resent = load.resent - resent
        time.sleep(_SETTLE_SECONDS)
        load.run(devices)
        unloaded_seconds += load.run(half)
    return AttackFigures(kind, 2 * half / unloaded_seconds, loaded, flood_rate, resent, cores)


def _plan(kind: str, rate: float, served: Served, folder: Path) -> FloodPlan:
    write = Topics().write
    topics = [write(UpTopic(0, device.handle)) for device in served.fleet]
    match kind:
        case "enrolment":
            topics = [write(EnrolRequestTopic())]
            head = bytes((1, MessageType.ENROL_REQUEST)) + (1).to_bytes(8, "little")
            payloads = [
                head + os.urandom(24) + served.load.incarnation + bytes(8) + os.urandom(1416)
                for _ in range(_PAYLOADS)
            ]
        case "insider":
            topics = [write(UpTopic(0, served.idler.handle))]
            payloads = [served.load.forged_open(served.idler) for _ in range(_PAYLOADS)]
        case "garbage":  # looks like an envelope of a session that nobody has
            payloads = [b"\x01\x10" + bytes(2) + os.urandom(596) for _ in range(_PAYLOADS)]
        case _:
            payloads = [served.load.forged_open(device) for device in served.fleet]
    inside = kind == "insider"
    return FloodPlan(
        served.broker.port,
        served.idler.handle.hex() if inside else "flood",
        served.broker.account("devices") if inside else None,
        rate,
        topics,
        [payload.hex() for payload in payloads],
        str(folder / "count"),
    )


@contextmanager
def _flood(
    served: Served, plan: FloodPlan, folder: Path
) -> Iterator[tuple[Callable[[], int], int]]:
    plan.write(folder / "flood.json")
    count = Path(plan.count_file)
    command = [sys.executable, "-m", "benchmarks.aggregator.flood", str(folder / "flood.json")]
    process = subprocess.Popen(command)
    try:
        while not count.exists():
            if process.poll() is not None:
                raise RuntimeError("the flood did not start")
            time.sleep(0.02)
        yield lambda: int(count.read_text() or 0), process.pid
        if process.poll() is not None:
            raise RuntimeError("the flood ended before its time")
    finally:
        process.kill()
        process.wait(10)
