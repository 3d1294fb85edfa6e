"""Rounds of a method on local arrays, over a real broker, in which processes are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from aggregator.home import AggregatorHome as AggregatorHome
from aggregator.keys.folder import initialise
from device_sdk.device import Device
from device_sdk.methods.state import State
from device_sdk.status import DeviceStatus
from tests.brokers.links import QUICK
from tests.fakes.homes import ServeProcess, invite
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS, wait_until

__all__ = [
    "DEVICES",
    "ROUNDS",
    "Death",
    "final_state",
    "make_home",
    "run_with_deaths",
    "run_with_deaths_at",
]

DEVICES, ROUNDS = 3, 6
Death = tuple[str, int]
"""A point of ``tests.faults.crash_points``, and which passage of it is the last."""
SCRIPT = Path(__file__).with_name("array_device.py")


def make_home(
    folder: Path,
    url: str,
    rounds: int = ROUNDS,
    pause: float = 0.15,
    *,
    method: str,
    settings: Mapping[str, object],
    task: str = "",
    table: str = "",
    store_url: str | None = None,
) -> AggregatorHome:
    """The artifact is the one in ``folder / "linear"``; ``settings`` are those of the training;
    ``task`` and ``table``: further lines of ``[task]`` and of the method's own table."""
    lines = (f"{name} = {json.dumps(value)}" for name, value in settings.items())
    home = AggregatorHome(folder / "fleet", store_url)
    initialise(home, int(time.time()), os.urandom)
    home.task_file.write_text(
        f"""
[task]
method = "{method}"
artifacts = ["{folder / "linear"}"]
broadcast_codec = "float32"
update_codec = "float32"
{task}
[broker]
url = "{url}"
[round]
quorum = {DEVICES}
wait_for_devices = {DEVICES}
deadline_seconds = {NEVER_SECONDS}
resume_grace_seconds = 2.0
pause_seconds = {pause}
most_rounds = {rounds}
[{method}]
{table}
[{method}.training]
"""
        + "\n".join(lines)
    )
    return home


class DeviceProcess:
    """A device that can be killed and started again."""

    def __init__(self, home: Path, place: int, data: str) -> None:
        self._command = [sys.executable, str(SCRIPT), str(home), str(place), data]
        self._process: subprocess.Popen[str] | None = None

    def start(self, point: str = "", calls: int = 0) -> None:
        """Start; at the ``calls``-th passage of ``point``, if any, it kills itself."""
        armed = [point, str(calls)] if point else []
        self._process = subprocess.Popen(
            [*self._command, *armed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ended(self) -> int | None:
        """The exit code of a process that is gone, -9 for one killed; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=PATIENCE_SECONDS)
            self._process = None


@contextmanager
def enrolled(home: AggregatorHome, url: str, folder: Path) -> Iterator[list[Path]]:
    homes = []
    for place, code in enumerate(invite(home, DEVICES)):
        device = Device.enrol(
            url,
            code,
            folder / f"device-{place}",
            link_settings=QUICK,
            timeout_seconds=PATIENCE_SECONDS,
        )
        homes.append(device.home)
        device.close()
    yield homes


def version_of(home: AggregatorHome) -> int:
    store = home.open_store()
    checkpoint = store.first.checkpoints.get("version")
    store.database.close()
    return 0 if checkpoint is None else checkpoint.version


def await_version(home: AggregatorHome, version: int) -> None:
    wait_until(lambda: version_of(home) >= version, lambda: version_of(home))


def run_with_deaths(
    home: AggregatorHome, url: str, folder: Path, data: str
) -> tuple[list[Path], list[DeviceStatus]]:
    """All rounds, with kill -9 of two devices and of the aggregator; the devices' homes and last
    states, once each has its receipt of the last round."""
    server = ServeProcess(home)
    server.start()
    with ExitStack() as stack:
        stack.callback(server.kill)
        homes = stack.enter_context(enrolled(home, url, folder))
        processes = [DeviceProcess(each, place, data) for place, each in enumerate(homes)]
        for process in processes:
            stack.callback(process.kill)
            process.start()
        await_version(home, 2)
        processes[0].kill()
        time.sleep(0.3)
        processes[0].start()
        await_version(home, 3)
        server.kill()
        processes[1].kill()
        processes[1].start()
        server.start()
        await_version(home, ROUNDS)
        return homes, [await_receipts(each) for each in homes]


def run_with_deaths_at(
    home: AggregatorHome,
    url: str,
    folder: Path,
    data: str,
    *,
    devices: Sequence[Death],
    server: Sequence[Death],
) -> tuple[list[Path], list[DeviceStatus]]:
    """All rounds, in which each device kills itself once and the aggregator as often as told, each
    at its point, and is started again. Returns as :func:`run_with_deaths` does."""
    serving, waiting = ServeProcess(home), list(server)
    serving.start(*waiting[0])
    with ExitStack() as stack:
        stack.callback(serving.kill)
        homes = stack.enter_context(enrolled(home, url, folder))
        processes = [DeviceProcess(each, place, data) for place, each in enumerate(homes)]
        alive = set(range(DEVICES))
        for process, death in zip(processes, devices, strict=True):
            stack.callback(process.kill)
            process.start(*death)
        until = time.monotonic() + 240  # a machine that is busy otherwise takes minutes
        while version_of(home) < ROUNDS or alive or waiting:
            for place, process in enumerate(processes):
                if process.ended() is not None:
                    assert process.ended() == -signal.SIGKILL and place in alive
                    alive.remove(place)
                    process.start()
            if serving.ended() is not None:
                assert serving.ended() == -signal.SIGKILL, serving.log.read_text()
                waiting.pop(0)
                serving.start(*(waiting[0] if waiting else ()))
            assert time.monotonic() < until, (version_of(home), alive, waiting)
            time.sleep(0.02)
        return homes, [await_receipts(each) for each in homes]


def await_receipts(folder: Path) -> DeviceStatus:
    """A device's state, once nothing waits to be sent and the round after the last was read."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        with Device.open(folder, read_only=True) as device:
            status = device.status()
        if status.outbox == 0 and status.outcome == "read":
            return status
        assert time.monotonic() < until, status
        time.sleep(0.05)


def final_state(home: AggregatorHome) -> State:
    """What the aggregator has after all rounds; each must have counted each device once."""
    store = home.open_store()
    checkpoint = store.first.checkpoints.get("version")
    rounds = {row.round: row.participants for row in store.first.rounds.latest(50) if row.threshold}
    store.database.close()
    assert rounds == dict.fromkeys(range(1, ROUNDS + 1), DEVICES)
    assert checkpoint is not None
    return checkpoint.state
