"""kill -9 of the aggregator's process: every counted update is in exactly one version, once."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np

from aggregator.home import AggregatorHome
from aggregator.task.file import read_task
from device_sdk.methods.state import State
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import ITEMS, ServeProcess, invite, make_home
from tests.fakes.stubborn import Stubborn

DEVICES = 6
ROUNDS = 6
KILLS = 5
ROUND = f"""quorum = {DEVICES}
wait_for_devices = {DEVICES}
most_rounds = {ROUNDS}"""


def _final_state(home: AggregatorHome) -> State:
    store = home.open_store()
    checkpoint = store.first.checkpoints.get("version")
    store.database.close()
    assert checkpoint is not None
    return checkpoint.state


def test_kill_nine_at_random_moments(mosquitto: Mosquitto, tmp_path: Path) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND, '[scatter.optimizer]\nname = "plain"')
    process = ServeProcess(home)
    process.start()
    process.await_connections(1)
    stubborn = [
        Stubborn(ScriptedDevice(mosquitto.url, code, seed), ROUNDS)
        for seed, code in enumerate(invite(home, DEVICES))
    ]
    chance = random.Random(5)
    try:
        for each in stubborn:
            each.device.enrol().join()
        threads = [threading.Thread(target=each.run) for each in stubborn]
        for thread in threads:
            thread.start()
        kills = 0
        while any(thread.is_alive() for thread in threads):
            time.sleep(chance.uniform(0.05, 0.6))
            if kills < KILLS:
                process.kill()
                process.start()
                process.await_connections(kills + 2)
                kills += 1
        for thread in threads:
            thread.join()
        assert [each.error for each in stubborn] == [None] * DEVICES
        assert kills == KILLS
        assert process.stop() == 0
    finally:
        process.kill()
        for each in stubborn:
            each.device.disconnect()
    assert all(each.counted == list(range(1, ROUNDS + 1)) for each in stubborn)
    store = home.open_store()
    rounds = [row for row in store.first.rounds.latest(50) if row.closed_unix_seconds is not None]
    assert sorted((row.round, row.participants, row.next_version) for row in rounds) == [
        (number, DEVICES, number) for number in range(1, ROUNDS + 1)
    ]
    seed = store.facts.seed
    store.database.close()
    # The same updates without a crash, in another order: sums of float32 in float64 are exact
    # enough that only the last bits could differ.
    binding = read_task(home.task_file).binding
    method = binding.build(ITEMS, np.random.default_rng([seed, 0]))
    for number in range(1, ROUNDS + 1):
        method.open_round(number)
        for each in stubborn:
            method.absorb(binding.decode(each.bodies[number], number, ITEMS))
        method.close_round()
    ours, theirs = _final_state(home)["items"], method.state()["items"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
