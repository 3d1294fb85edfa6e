"""Honest updates a second while somebody floods the aggregator's topics, against without."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
        with closing(_Flood(_plan(kind, rate, served, folder), folder)) as flood:
            flood.next_note()
            time.sleep(_SETTLE_SECONDS)
            load.run(devices)  # the round that was open when the flood began
            pids = {
                "aggregator": served.pid,
                "broker": served.broker.pid,
                "fleet": os.getpid(),
                "flood": flood.pid,
            }
            before = flood.next_note()
            resent, began = load.resent, time.perf_counter()
            cpu = {name: cpu_seconds(pid) for name, pid in pids.items()}
            loaded = devices * rounds / load.run(devices * rounds)
            seconds = time.perf_counter() - began
            cores = {name: (cpu_seconds(pid) - cpu[name]) / seconds for name, pid in pids.items()}
            resent = load.resent - resent
            after = flood.next_note()
        time.sleep(_SETTLE_SECONDS)
        load.run(devices)
        unloaded_seconds += load.run(half)
    flood_rate = (after.sent - before.sent) / (after.seconds - before.seconds)
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


class _Note(NamedTuple):
    sent: int
    seconds: float


class _Flood:
    """A flood's process."""

    def __init__(self, plan: FloodPlan, folder: Path) -> None:
        plan.write(folder / "flood.json")
        self._count = Path(plan.count_file)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.aggregator.flood", str(folder / "flood.json")]
        )
        self.pid = self._process.pid

    def next_note(self) -> _Note:
        """What it wrote down since it was asked: it does so ten times a second, and a round may
        take less."""
        seen = self._read()
        while (note := self._read()) == seen:
            if self._process.poll() is not None:
                raise RuntimeError("the flood ended before its time")
            time.sleep(0.01)
        return note

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def _read(self) -> _Note:
        try:
            sent, seconds = self._count.read_text().split()
        except FileNotFoundError:
            return _Note(-1, 0.0)
        return _Note(int(sent), float(seconds))
