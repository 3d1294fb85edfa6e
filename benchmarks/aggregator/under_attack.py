"""Honest updates a second while somebody floods the aggregator's topics, against without."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aggregator.rounds.machine import RoundOpened
from aggregator.serve.assembly import World, assemble
from aggregator.task.file import read_task
from benchmarks.aggregator.broker import running_mosquitto
from benchmarks.aggregator.fleet import enrol_directly, make_bench_home, scatter_body
from benchmarks.aggregator.flood import FloodPlan
from benchmarks.aggregator.serving import Served, cpu_seconds, serving
from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.receipts import UpdateIdentity, Verdict, write_update
from device_sdk.wire.publish.topics import EnrolRequestTopic, Topics

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
    topics = [device.up_topic for device in served.fleet]
    match kind:
        case "enrolment":
            topics = [Topics().write(EnrolRequestTopic())]
            head = bytes((1, MessageType.ENROL_REQUEST)) + (1).to_bytes(8, "little")
            payloads = [
                head + os.urandom(24) + served.load.incarnation + bytes(8) + os.urandom(1416)
                for _ in range(_PAYLOADS)
            ]
        case "insider":
            topics = [served.idler.up_topic]
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
