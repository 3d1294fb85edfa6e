"""``serve --cluster ray --address``: workers outlive a coordinator, and a standby finds them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from device_sdk.device import Device
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.array_device import local_data
from tests.fakes.brisk import BRISK
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import AggregatorHome, command, invite
from tests.fakes.killed_rounds import DEVICES, await_version, make_home
from tests.fakes.ray_head import ray_head
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.servers.fixtures import MakeDatabase

pytest.importorskip("ray")
ROUNDS = 6


@dataclass
class Fleet:
    """A home whose store is a database, and what its processes are started with."""

    home: AggregatorHome
    here: Path
    """A folder of a short path, for Ray."""
    environment: dict[str, str]
    log: Path

    def coordinator(self, address: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "aggregator.cli", "serve", "--home", str(self.home.folder)]
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [*program, "--plain", "--cluster", "ray", "--address", address, "--standby"],
                stdout=output,
                stderr=output,
                env=self.environment,
            )


@pytest.fixture
def fleet(mosquitto: Mosquitto, tmp_path: Path, make_database: MakeDatabase) -> Iterator[Fleet]:
    linear_artifact(tmp_path / "linear")
    home = make_home(
        tmp_path, mosquitto.url, ROUNDS, method="fedavg", settings={"epochs": 2, "batch_size": 4}
    )
    url = make_database()
    with home.task_file.open("a") as file:
        file.write(f'\n[cluster]\nworkers = 2\nstore = "{url}"\n')
    assert command(home, "store", "--move") == 0
    here = Path(tempfile.mkdtemp(prefix="u"))
    environment = {
        **os.environ,
        "HOME": str(here),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # A machine that does much else takes more than Ray's own minute, and quarter of one.
        "RAY_raylet_start_wait_time_s": str(round(PATIENCE_SECONDS)),
        "RAY_worker_niceness": "0",
        "RAY_agent_register_timeout_ms": str(round(1000 * PATIENCE_SECONDS)),
    }
    yield Fleet(AggregatorHome(home.folder, url), here, environment, tmp_path / "serve.log")
    shutil.rmtree(here, ignore_errors=True)


def test_a_standby_finds_the_workers_of_a_coordinator_that_was_killed(
    fleet: Fleet, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home, log = fleet.home, fleet.log
    with ExitStack() as stack:
        address = stack.enter_context(ray_head(fleet.environment, fleet.here))
        first = fleet.coordinator(address)
        stack.callback(first.kill)
        wait_until(
            lambda: "connected to" in log.read_text() or first.poll() is not None, log.read_text
        )
        assert first.poll() is None, log.read_text()
        second = fleet.coordinator(address)
        stack.callback(second.kill)
        for place, code in enumerate(invite(home, DEVICES)):
            folder = tmp_path / f"device-{place}"
            Device.enrol(
                mosquitto.url, code, folder, link_settings=QUICK, timeout_seconds=PATIENCE_SECONDS
            ).close()
            data = local_data(place)
            device = Device.open(folder, pace=BRISK, link_settings=QUICK, data=data)
            stack.enter_context(device).start()
        await_version(home, 1)
        first.kill()
        await_version(home, ROUNDS)
        second.send_signal(signal.SIGTERM)
        assert second.wait(PATIENCE_SECONDS) == 0, log.read_text()
    store = home.open_store()
    epochs = [row.epoch for row in store.workers.all()]
    lease = store.lease.find()
    rounds = {row.round: row.participants for row in store.first.rounds.latest(50) if row.threshold}
    store.database.close()
    assert epochs == [1, 1]  # nobody was started again
    assert lease is not None and lease.term == 2
    assert rounds == dict.fromkeys(range(1, ROUNDS + 1), DEVICES)


@pytest.mark.exhaustive
def test_a_takeover_waits_for_no_worker_and_ends_none_that_hangs_for_a_moment(fleet: Fleet) -> None:
    def connected() -> int:
        lines = fleet.log.read_text().splitlines()
        return sum("connected to" in line and "WorkerActor" not in line for line in lines)

    with ExitStack() as stack:
        address, first = _with_hanging_workers(fleet, stack)
        first.kill()
        before = connected()
        second = fleet.coordinator(address)
        stack.callback(second.kill)
        wait_until(lambda: connected() > before, fleet.log.read_text)
        assert "does not say what it serves" not in fleet.log.read_text()
        for worker in _workers():
            worker.resume()
        second.send_signal(signal.SIGTERM)
        assert second.wait(PATIENCE_SECONDS) == 0, fleet.log.read_text()
    assert _epochs(fleet) == [1, 1]


@pytest.mark.exhaustive
def test_a_worker_that_hangs_holds_up_no_move_to_another_broker(
    fleet: Fleet, make_mosquitto: MakeMosquitto
) -> None:
    """Whoever was started for the old one is replaced without a word from it."""
    new = make_mosquitto()
    with ExitStack() as stack:
        _, first = _with_hanging_workers(fleet, stack)
        assert command(fleet.home, "broker", "move", new.url) == 0
        wait_until(lambda: _epochs(fleet) == [2, 2], fleet.log.read_text)
        assert "does not answer" not in fleet.log.read_text()
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE_SECONDS) == 0, fleet.log.read_text()


def _with_hanging_workers(fleet: Fleet, stack: ExitStack) -> tuple[str, subprocess.Popen[bytes]]:
    """Ray's address, and a coordinator whose two workers heard their orders, and hang since."""
    address = stack.enter_context(ray_head(fleet.environment, fleet.here))
    first = fleet.coordinator(address)
    stack.callback(first.kill)
    wait_until(lambda: len(_workers()) == 2 and len(_epochs(fleet)) == 2, fleet.log.read_text)
    for worker in _workers():
        worker.suspend()
        stack.callback(_go_on, worker)
    return address, first


def _epochs(fleet: Fleet) -> list[int]:
    """How often each worker was started and heard its orders."""
    store = fleet.home.open_store()
    try:
        return [row.epoch for row in store.workers.all()]
    finally:
        store.database.close()


def _go_on(worker: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        worker.resume()


def _workers() -> list[psutil.Process]:
    """Below us."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if (each.cmdline() or [""])[0].startswith("ray::WorkerActor"):
                found.append(each)
    return found
