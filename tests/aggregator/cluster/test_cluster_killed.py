"""kill -9 of workers and of the coordinator, and a process that was frozen and comes back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from aggregator.home import AggregatorHome
from aggregator.task.cluster import Cell, Cluster
from device_sdk.wire.seal.handshake import read_open_head
from device_sdk.wire.seal.placement import shard_of
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.clusters import Coordinated, Processes, coordinated
from tests.fakes.homes import invite, make_home
from tests.fakes.stubborn import Stubborn
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.servers.fixtures import MakeDatabase

DEVICES, ROUNDS = 6, 6
ROUND = f"""quorum = {DEVICES}
wait_for_devices = {DEVICES}
most_rounds = {ROUNDS}"""
TWO = Cluster((Cell("", None, 2),))


def _rounds(home: AggregatorHome) -> list[tuple[int, int | None, int | None]]:
    store = home.open_store()
    rows = [row for row in store.first.rounds.latest(50) if not row.unfinished]
    store.database.close()
    return sorted((row.round, row.participants, row.next_version) for row in rows)


def _epochs(home: AggregatorHome) -> list[int]:
    store = home.open_store()
    found = [row.epoch for row in store.workers.all()]
    store.database.close()
    return found


def _granted(home: AggregatorHome, device_id: bytes) -> int:
    store = home.open_store()
    found = store.granted.of(device_id)
    store.database.close()
    return found


def _runtime(running: Coordinated) -> Processes:
    assert isinstance(running.runtime, Processes)
    return running.runtime


def test_a_frozen_worker_that_comes_back_writes_nothing_and_ends(
    mosquitto: Mosquitto, tmp_path: Path, store_url: str | None
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND, store_url=store_url)
    with coordinated(home, TWO, processes=True) as running:
        runtime = _runtime(running)
        wait_until(lambda: len(_epochs(home)) == 2, lambda: runtime.log.read_text())
        zombie = runtime.workers[0]
        zombie.signal(signal.SIGSTOP)
        # Taken for dead: another one gets its slot.
        runtime.workers[0] = type(zombie)(zombie.post, runtime.log)
        wait_until(lambda: _epochs(home)[0] == 2, lambda: runtime.log.read_text())
        zombie.signal(signal.SIGCONT)
        assert zombie.wait() == 3
        assert "held by epoch 2" in runtime.log.read_text()
        assert runtime.workers[0].ended() is None


def test_an_open_that_was_granted_is_not_granted_again_by_the_next_process(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    with coordinated(home, TWO, processes=True) as running:
        runtime = _runtime(running)
        device = ScriptedDevice(mosquitto.url, *invite(home)).enrol().join()
        opening = device.new_opening()
        device.publish_up(opening.message)
        place = shard_of(device.require_grant().device_id) % 2
        counter = read_open_head(opening.message).freshness.counter
        device_id = device.require_grant().device_id
        wait_until(lambda: _granted(home, device_id) == counter, lambda: "not granted")
        epochs = _epochs(home)
        runtime.workers[place].signal(signal.SIGKILL)
        wait_until(
            lambda: runtime.log.read_text().count("connected to") == 3, lambda: "not connected"
        )
        assert _epochs(home)[place] == epochs[place] + 1
        device.publish_up(opening.message)
        refused = "refused from an unknown sender: replayed"
        wait_until(lambda: refused in runtime.log.read_text(), lambda: runtime.log.read_text())
        device.disconnect()


class Coordinator:
    """A coordinator's process."""

    def __init__(self, home: AggregatorHome) -> None:
        self.log = home.folder / "coordinators.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.fakes.coordinator_process",
                    str(home.folder),
                    "2",
                    home.store_url or "",
                ],
                stdout=log,
                stderr=log,
            )

    def await_said(self, words: str) -> None:
        text = f"coordinator {self.process.pid} {words}"
        wait_until(lambda: text in self.log.read_text(), self.log.read_text)


def test_a_standby_takes_over_from_one_that_is_killed_or_frozen(
    mosquitto: Mosquitto, tmp_path: Path, make_database: MakeDatabase
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND, store_url=make_database())
    coordinators = [Coordinator(home)]
    coordinators[0].await_said("coordinating, term 1")
    stubborn = [
        Stubborn(ScriptedDevice(mosquitto.url, code, seed), ROUNDS)
        for seed, code in enumerate(invite(home, DEVICES))
    ]
    threads = [threading.Thread(target=each.run) for each in stubborn]
    try:
        for each in stubborn:
            each.device.enrol().join()
        coordinators.append(Coordinator(home))
        coordinators[1].await_said("standing by")
        for thread in threads:
            thread.start()
        wait_until(lambda: len(_rounds(home)) >= 1, coordinators[0].log.read_text)
        coordinators[0].process.kill()
        killed = time.monotonic()
        coordinators[1].await_said("coordinating, term 2")
        # That it is ten at most, test_lease.py shows.
        print(f"another one coordinates {time.monotonic() - killed:.1f} s after the kill")
        wait_until(lambda: len(_rounds(home)) >= 3, coordinators[1].log.read_text)
        coordinators.append(Coordinator(home))
        coordinators[2].await_said("standing by")
        coordinators[1].process.send_signal(signal.SIGSTOP)
        coordinators[2].await_said("coordinating, term 3")
        coordinators[1].process.send_signal(signal.SIGCONT)
        assert coordinators[1].process.wait(PATIENCE_SECONDS) == 3
        for thread in threads:
            thread.join()
        assert [each.error for each in stubborn] == [None] * DEVICES
        wait_until(lambda: len(_rounds(home)) >= ROUNDS, coordinators[2].log.read_text)
        coordinators[2].process.send_signal(signal.SIGTERM)
        assert coordinators[2].process.wait(PATIENCE_SECONDS) == 0
    finally:
        for coordinator in coordinators:
            coordinator.process.send_signal(signal.SIGCONT)
            coordinator.process.kill()
        for each in stubborn:
            each.device.disconnect()
    assert all(each.counted == list(range(1, ROUNDS + 1)) for each in stubborn)
    assert _rounds(home) == [(n, DEVICES, n) for n in range(1, ROUNDS + 1)]
