"""All workers are restarted in the midst of a round, one after the other: nothing is lost."""

from __future__ import annotations

import itertools
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from aggregator.rounds.machine import RoundClosed
from aggregator.store.versions import pack_state
from aggregator.task.cluster import Cell, Cluster
from aggregator.task.file import read_task
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.clusters import Coordinated, Processes, coordinated
from tests.fakes.homes import ITEMS, invite, make_home
from tests.fakes.stubborn import Stubborn
from tests.fakes.waiting import wait_until

WORKERS, WAVES, WAVE = 2, 4, 2
DEVICES, ROUNDS = WAVES * WAVE, 3
RESTARTED_BY = {2: signal.SIGTERM, 3: signal.SIGKILL}
"""In which round, and how; the first round keeps bodies, these sums."""
ROUND = f"""quorum = {DEVICES}
wait_for_devices = {DEVICES}
most_rounds = {ROUNDS}"""


@pytest.mark.slow
def test_a_rolling_restart_loses_nothing(
    mosquitto: Mosquitto, tmp_path: Path, store_url: str | None
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND, store_url=store_url)
    pairs = itertools.product(range(1, ROUNDS + 1), range(WAVES))
    may_send = {pair: threading.Event() for pair in pairs}
    with coordinated(home, Cluster((Cell("", None, WORKERS),)), processes=True) as running:
        runtime = running.runtime
        assert isinstance(runtime, Processes)

        def held(wave: int) -> Stubborn:
            device = ScriptedDevice(mosquitto.url, codes.pop(), len(codes))
            return Stubborn(device, ROUNDS, lambda number: may_send[number, wave].wait())

        codes = invite(home, DEVICES)
        waves = [[held(wave) for _ in range(WAVE)] for wave in range(WAVES)]
        fleet = [each for wave in waves for each in wave]
        for each in fleet:
            each.device.enrol().join()
        threads = [threading.Thread(target=each.run, daemon=True) for each in fleet]
        for thread in threads:
            thread.start()

        def await_counted(number: int, *those: int) -> None:
            """These may send; wait for their receipts."""
            for wave in those:
                may_send[number, wave].set()
            them = [each for wave in those for each in waves[wave]]
            wait_until(
                lambda: all(each.error or number in each.counted for each in them),
                runtime.log.read_text,
            )

        restarts = 0
        for number in range(1, ROUNDS + 1):
            await_counted(number, 0)
            for slot in range(WORKERS if number in RESTARTED_BY else 0):
                # This wave speaks while one of the two is not there.
                may_send[number, slot + 1].set()
                restarts += 1
                _restart(runtime, slot, RESTARTED_BY[number], restarts)
                await_counted(number, slot + 1)
            await_counted(number, *range(WAVES))
        for thread in threads:
            thread.join()
        for each in fleet:
            each.device.disconnect()
        assert [each.error for each in fleet] == [None] * DEVICES, runtime.log.read_text()
        wait_until(lambda: len(_closed(running)) == ROUNDS, lambda: running.rounds)
    assert all(each.counted == list(range(1, ROUNDS + 1)) for each in fleet)
    store = home.open_store()
    checkpoint, seed = store.first.checkpoints.get("version"), store.facts.seed
    store.database.close()
    assert [each.summary.participants for each in _closed(running)] == [DEVICES] * ROUNDS
    # The same bits as in one process that nobody disturbs.
    binding = read_task(home.task_file).binding
    method = binding.build(ITEMS, np.random.default_rng([seed, 0]))
    for number in range(1, ROUNDS + 1):
        method.open_round(number)
        for each in sorted(fleet, key=lambda each: each.device.require_grant().device_id):
            device_id = each.device.require_grant().device_id.hex()
            method.absorb(binding.decode(each.bodies[number], number, ITEMS, device_id))
        method.close_round()
    assert checkpoint is not None
    assert pack_state(checkpoint.state) == pack_state(method.state())


def _closed(running: Coordinated) -> list[RoundClosed]:
    return [each for each in running.rounds if isinstance(each, RoundClosed)]


def _restart(runtime: Processes, slot: int, by: signal.Signals, times: int) -> None:
    """``times``: how often any was, with this one."""
    worker = runtime.workers[slot]
    runtime.restarts = False
    worker.signal(by)
    assert worker.wait() == (0 if by is signal.SIGTERM else -by)
    runtime.restarts = True
    wait_until(
        lambda: runtime.log.read_text().count("connected to") == WORKERS + times,
        runtime.log.read_text,
    )
