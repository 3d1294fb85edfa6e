"""A power cut takes what was not flushed: kill -9 cannot show that, a trace of system calls can.

Both real processes run under strace. Each update's bytes are found where they are written to the
database's log; the log must be flushed before the receipt leaves the aggregator, and before the
update leaves the device.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.brokers.mosquitto import Mosquitto
from tests.fakes.waiting import PATIENCE_SECONDS
from tests.faults.fleet_home import make_fleet
from tests.faults.known import known_body
from tests.faults.oracle import outbox_rows

STRACE = shutil.which("strace")
UPDATES = 4
_CALLS = "trace=fsync,fdatasync,pwrite64,write,sendto,sendmsg,writev"
_AGGREGATOR = "import sys; from tests.faults.aggregator_process import serve as run; "
_DEVICE = "import sys; from tests.faults.device_process import live as run; "
_LINE = re.compile(r"(\w+)\(\d+<([^>]*)>(.*)")


@dataclass
class _Traced:
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        for child in self.log.parent.glob(f"{self.log.name}.*"):
            pid = int(child.suffix[1:])
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(PATIENCE_SECONDS)


def _trace(log: Path, program: str) -> _Traced:
    command = [str(STRACE), "-ff", "-ttt", "-y", "-xx", "-s", "20000", "-e", _CALLS, "-o", str(log)]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", program], cwd=Path(__file__).parents[2]
    )
    return _Traced(process, log)


def _events(log: Path, sent: re.Pattern[bytes], bodies: list[bytes]) -> list[str]:
    """In order of time: ``flushed`` of the database's log, ``sent``, and ``written N`` where the
    bytes of ``bodies[N]`` are written to it."""
    stamped: list[tuple[float, str]] = []
    for file in log.parent.glob(f"{log.name}.*"):
        for line in file.read_text().splitlines():
            stamp, _, call = line.partition(" ")
            match = _LINE.match(call)
            if match is None:
                continue
            name, path, rest = match.groups()
            path = bytes.fromhex(path.replace("\\x", "")).decode() if "\\x" in path else path
            texts = re.findall(r'"([^"]*)"', rest)
            data = b"".join(bytes.fromhex(text.replace("\\x", "")) for text in texts)
            if path.endswith("-wal"):
                if name in ("fsync", "fdatasync"):
                    stamped.append((float(stamp), "flushed"))
                found = [number for number, body in enumerate(bodies) if body in data]
                stamped += [(float(stamp), f"written {number}") for number in found]
            elif "socket" in path or "TCP" in path:
                stamped += [(float(stamp), "sent")] * len(sent.findall(data))
    return [kind for _, kind in sorted(stamped)]


def _said_too_early(events: list[str], number: int) -> bool:
    """Whether something was sent between the first write of a body and the flush after it.

    There is one device, and it sends one update at a time: what is sent next is about this one.
    """
    behind = events[events.index(f"written {number}") :]
    return behind.index("sent") < behind.index("flushed")


def _envelope(direction: str, message_type: bytes) -> re.Pattern[bytes]:
    """A PUBLISH of an envelope: topic, packet id (receipts have none, they travel at QoS 0), with
    MQTT 5 no properties, version and type."""
    topic = rb"tessera/" + direction.encode() + rb"/[0-9a-f]{32}"
    return re.compile(topic + rb"(?:..)?\x00?\x01" + re.escape(message_type), re.DOTALL)


@pytest.mark.slow
def test_what_is_said_was_flushed_before(mosquitto: Mosquitto, tmp_path: Path) -> None:
    if STRACE is None:
        pytest.skip("strace is not installed (apt-get install strace)")
    lines = f"quorum = 1\nmost_rounds = {UPDATES}\npause_seconds = 0.3"
    fleet = make_fleet(tmp_path, mosquitto.url, 1, lines, seed=1)
    aggregator, device = tmp_path / "aggregator.trace", tmp_path / "device.trace"
    counters = str(tmp_path / "counters")
    home, log = str(fleet.aggregator.folder), str(tmp_path / "log")
    mine = f"{[str(fleet.devices[0])]!r}, [0], {counters!r}, {log + '-device'!r}"
    traced = [
        _trace(aggregator, f"{_AGGREGATOR}run({home!r}, {counters!r}, {log!r}, False, '', 0)"),
        _trace(device, f"{_DEVICE}run({mine}, False, '', 0)"),
    ]
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            store = fleet.aggregator.open_store()
            latest = store.first.rounds.latest()
            store.database.close()
            if latest and latest[0].threshold == 0 and not outbox_rows(fleet, 0):
                break
            assert time.monotonic() < until, "the rounds did not end in time"
            time.sleep(0.1)
    finally:
        for each in traced:
            each.stop()
    store = fleet.aggregator.open_store()
    generation = store.facts.generation
    store.database.close()
    bodies = [known_body(0, generation, number + 1) for number in range(UPDATES)]
    receipts = _events(aggregator, _envelope("down", b"\x11"), bodies)
    updates = _events(device, _envelope("up/[0-9]+", b"\x12"), bodies)
    assert [_said_too_early(receipts, number) for number in range(UPDATES)] == [False] * UPDATES
    assert [_said_too_early(updates, number) for number in range(UPDATES)] == [False] * UPDATES


def test_the_check_notices_what_is_said_before_its_flush() -> None:
    assert not _said_too_early(["written 0", "flushed", "sent"], 0)
    assert _said_too_early(["flushed", "written 0", "sent", "flushed"], 0)
