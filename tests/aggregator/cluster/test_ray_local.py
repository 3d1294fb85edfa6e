"""``serve --cluster ray --local``: a Ray of its own, real devices, and a killed worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from device_sdk.device import Device
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.array_device import local_data
from tests.fakes.brisk import BRISK
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import invite
from tests.fakes.killed_rounds import DEVICES, await_version, make_home
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

pytest.importorskip("ray")
ROUNDS = 4


def test_a_fleet_on_a_ray_of_its_own(mosquitto: Mosquitto, tmp_path: Path) -> None:
    linear_artifact(tmp_path / "linear")
    home = make_home(
        tmp_path, mosquitto.url, ROUNDS, method="fedavg", settings={"epochs": 2, "batch_size": 4}
    )
    log = tmp_path / "serve.log"
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def epochs() -> list[int]:
        store = home.open_store()
        found = sorted(row.epoch for row in store.workers.all())
        store.database.close()
        return found

    here = Path(tempfile.mkdtemp(prefix="u"))  # short, as sockets' paths have to be
    environment = {**os.environ, "HOME": str(here), "TMPDIR": str(here)}
    command = [sys.executable, "-m", "aggregator.cli", "serve", "--home", str(home.folder)]
    with log.open("wb") as output, ExitStack() as stack:
        serve = subprocess.Popen(
            [*command, "--cluster", "ray", "--local", "--plain"],
            stdout=output,
            stderr=output,
            env=environment,
        )
        stack.callback(serve.kill)
        wait_until(lambda: "connected to" in log.read_text(), log.read_text)
        devices = []
        for place, code in enumerate(invite(home, DEVICES)):
            folder = tmp_path / f"device-{place}"
            Device.enrol(
                mosquitto.url, code, folder, link_settings=QUICK, timeout_seconds=PATIENCE_SECONDS
            ).close()
            data = local_data(place)
            device = Device.open(folder, pace=BRISK, link_settings=QUICK, data=data)
            devices.append(stack.enter_context(device))
            device.start()
        await_version(home, 1)
        pids = [int(each) for each in re.findall(r"WorkerActor pid=(\d+)", log.read_text())]
        assert [os.getpriority(os.PRIO_PROCESS, each) for each in pids] == [own] * len(pids)
        os.kill(pids[0], signal.SIGKILL)
        await_version(home, ROUNDS)
        # Rounds may have been over without it, where it had no device.
        wait_until(lambda: epochs() == [1, 2], log.read_text)
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(PATIENCE_SECONDS) == 0, log.read_text()
    lost = re.findall(r"worker (.+) (?:is gone|cannot be asked)", log.read_text())
    assert set(lost) <= {"0", "1"}, lost  # by number, as the log's events say
    store = home.open_store()
    rounds = {row.round: row.participants for row in store.first.rounds.latest(50) if row.threshold}
    store.database.close()
    assert rounds == dict.fromkeys(range(1, ROUNDS + 1), DEVICES)
    wait_until(lambda: not _of(here), lambda: _of(here))
    assert list(here.iterdir()) == []
    here.rmdir()


def _of(folder: Path) -> list[str]:
    """Processes that name a folder on their command lines."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = each.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found
