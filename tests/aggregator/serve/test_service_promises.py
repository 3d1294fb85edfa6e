"""Promises that take a month, a backup or a slow fleet to come true."""

from __future__ import annotations

import logging
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from aggregator.home import AggregatorHome
from aggregator.keys.folder import FleetKeys
from aggregator.serve.assembly import World, assemble
from aggregator.serve.service import Parts
from aggregator.store.rows import DeviceRow
from aggregator.task.file import read_task
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.receipts import Receipt, UpdateIdentity, Verdict, write_update
from device_sdk.world import TrainingOptions
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import WIDTH, command, invite, make_home, open_store, serving
from tests.fakes.quick import joined
from tests.fakes.scatter_updates import one_user
from tests.fakes.waiting import wait_until

DAY_SECONDS = 86_400.0


@dataclass
class SteppedClock:
    """Stands still until it is told to go on."""

    now: float

    def __call__(self) -> float:
        return self.now


def enrolled(home: AggregatorHome, count: int) -> list[bytes]:
    """Ids of devices, written as enrolment writes them."""
    rng = np.random.default_rng(7)
    store = home.open_store()
    rows = [
        DeviceRow(rng.bytes(16), rng.bytes(32), rng.bytes(16), rng.bytes(32), 0, rng.bytes(8), 1, 1)
        for _ in range(count)
    ]
    with store.database.transaction():
        for row in rows:
            store.devices.add(row)
    store.database.close()
    return [row.device_id for row in rows]


def body(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    tensors = one_user(WIDTH, range(3), rng.standard_normal(3), rng.standard_normal(WIDTH))
    return encode_scatter_update(Update(1, tensors), WIDTH, "float32")


def settle(parts: Parts, identity: UpdateIdentity, seed: int) -> Receipt:
    """Offer an update and commit; its receipt."""
    settled = parts.inbox.offer(identity.device_id, write_update(identity, body(seed)))
    if settled is None:
        (settled,) = parts.first.ingest.commit()
    return settled.receipt


def test_a_closed_rounds_verdicts_are_kept_for_thirty_days(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1\ndeadline_seconds = 60.0")
    anna, bert = enrolled(home, 2)
    clock, unix_clock = SteppedClock(100.0), SteppedClock(time.time())

    def step(seconds: float) -> None:
        clock.now += seconds
        unix_clock.now += seconds
        parts.housekeeping.turn()
        parts.first.rounds.tick()

    world = World(clock, unix_clock, np.random.default_rng(1))
    parts = assemble(home, home.open_store(), read_task(home.task_file), world)
    parts.first.rounds.tick()
    row = parts.first.rounds.current
    assert row is not None and row.expected == 2
    annas = UpdateIdentity(anna, "default", row.generation, row.round)
    berts = UpdateIdentity(bert, "default", row.generation, row.round)
    assert settle(parts, annas, 1).verdict is Verdict.COUNTED
    step(61.0)  # the deadline: the round closes with anna's update
    step(60.0)  # its verdicts' age is counted from the next minute on
    step(29.9 * DAY_SECONDS)
    assert settle(parts, annas, 1).verdict is Verdict.COUNTED
    assert settle(parts, annas, 2).verdict is Verdict.CONFLICT
    assert settle(parts, berts, 3).verdict is Verdict.LATE
    step(0.2 * DAY_SECONDS)
    assert settle(parts, annas, 1).verdict is Verdict.FORGOTTEN
    assert settle(parts, berts, 3).verdict is Verdict.FORGOTTEN
    assert list(parts.store.first.log.judged(row.generation, row.round)) == []
    parts.store.database.close()


def test_a_delegation_that_ends_is_told_of_every_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    start = time.time()
    clock = SteppedClock(start)
    keys = FleetKeys(home, store, clock, clock, os.urandom, 30 * 86_400)
    ends = keys.current().descriptor.delegation.expires_unix_seconds
    clock.now = ends - 31 * DAY_SECONDS
    keys.tend(between_rounds=True)
    assert caplog.messages == []
    clock.now = ends - 29.5 * DAY_SECONDS
    keys.tend(between_rounds=True)
    keys.tend(between_rounds=True)
    assert len(caplog.messages) == 1
    assert "delegation ends at 20" in caplog.text and "rotate keys" in caplog.text
    clock.now += DAY_SECONDS
    keys.tend(between_rounds=True)
    assert len(caplog.messages) == 2
    with caplog.at_level(logging.WARNING):
        FleetKeys(home, store, clock, clock, os.urandom, 30 * 86_400)  # a start says it too
    assert len(caplog.messages) == 3
    store.database.close()


def newest(device: ScriptedDevice) -> RoundManifest:
    """The newest manifest that a device has seen."""
    assert device.manifest is not None
    return device.manifest


def test_devices_follow_into_the_generation_after_a_restored_backup(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1")
    backup = tmp_path / "backup"
    with ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
        with serving(home):
            anna.enrol().join()
            assert anna.take_part(1).verdict is Verdict.COUNTED
            anna.await_round(2)
        shutil.copytree(home.folder, backup)
        with serving(home):
            anna.open_session()
            for number in (2, 3, 4):
                assert anna.take_part(number).verdict is Verdict.COUNTED
            lost = anna.await_round(5)
        shutil.rmtree(home.folder)
        shutil.copytree(backup, home.folder)
        assert command(home, "restored") == 0
        with serving(home):
            anna.open_session()
            anna.wait_for(lambda: newest(anna).generation > lost.generation)
            back = newest(anna)
            assert (back.round, back.version) == (3, 1)  # 2 was open in the backup: given up
            assert back.key_epoch > lost.key_epoch
            assert anna.send_and_wait(back, anna.body()).verdict is Verdict.COUNTED
            # What the lost rounds were told about means nothing any more.
            assert anna.send_and_wait(lost, anna.body()).verdict is Verdict.FORGOTTEN


def test_who_joins_a_fleet_that_rests_after_its_keys_were_rotated_reads_its_model(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1\nmost_rounds = 1")
    codes = invite(home, 3)
    with serving(home) as served:
        with ScriptedDevice(mosquitto.url, codes[0], 1) as anna:
            anna.enrol().join()
            assert anna.take_part(1).verdict is Verdict.COUNTED
            assert anna.await_round(2).version == 1  # which rests
        serial = served.parts.keys.current().descriptor.serial
        assert command(home, "rotate", "keys") == 0
        wait_until(lambda: served.parts.keys.current().descriptor.serial > serial)
        with ScriptedDevice(mosquitto.url, codes[1], 2) as bert:
            bert.enrol().join()
            assert bert.await_round(3).version == 1
    # Likewise while nobody serves.
    assert command(home, "rotate", "keys") == 0
    with serving(home) as served:
        wait_until(lambda: served.parts.fence.passed and not served.parts.outgoing.busy)
        with ScriptedDevice(mosquitto.url, codes[2], 3) as cleo:
            cleo.enrol().join()
            assert cleo.await_round(4).version == 1


def test_a_paused_task_shows_no_round_that_other_keys_signed(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1\npause_seconds = 0.1")
    (code,) = invite(home)
    options = TrainingOptions(k=4)
    with ExitStack() as stack:
        with serving(home) as served:
            device = stack.enter_context(
                joined(mosquitto.url, code, tmp_path / "device", options=options)
            )
            device.record_all([(f"item-{number}", "anna") for number in range(5)])
            device.start()
            wait_until(lambda: device.status().verdict == "counted")
            assert command(home, "task", "pause", "default") == 0
            wait_until(lambda: served.parts.first.rounds.current is None)
            last = device.status().receipted_round or 0
            device.stop()
        assert command(home, "restored") == 0
        with serving(home) as served:
            store = served.parts.store
            wait_until(lambda: not store.first.publications.topics("round"))
            wait_until(lambda: not store.retained.superseded())
            device.start()
            wait_until(lambda: device.status().session)
            assert command(home, "task", "resume", "default") == 0
            wait_until(lambda: (device.status().receipted_round or 0) > last)
            assert "bad-signature" not in device.status().refused


def test_the_last_round_of_a_task_that_0_1_0_paused_stays_for_who_joins(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1\npause_seconds = 0.1")
    codes = invite(home, 2)
    with serving(home) as served, ScriptedDevice(mosquitto.url, codes[0], 1) as anna:
        anna.enrol().join()
        assert anna.take_part(1).verdict is Verdict.COUNTED
        wait_until(lambda: served.parts.first.rounds.current is not None)
        assert command(home, "task", "pause", "default") == 0
        wait_until(lambda: served.parts.first.rounds.paused)
        anna.take_part(served.parts.first.rounds.next_number() - 1)
        wait_until(lambda: served.parts.first.rounds.current is None)
        last = served.parts.first.rounds.next_number() - 1
    store = open_store(home)
    with store.database.transaction():
        store.database.execute_many("DELETE FROM task_facts WHERE name = ?", [("signer",)])
    store.database.close()
    with serving(home) as served:
        wait_until(lambda: served.parts.fence.passed and not served.parts.outgoing.busy)
        assert served.parts.store.first.publications.topics("round")
        with ScriptedDevice(mosquitto.url, codes[1], 2) as bert:
            bert.enrol().join()
            assert bert.await_round(last).round == last


def test_a_round_that_ends_paused_after_its_keys_were_rotated_is_cleared(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1")
    (code,) = invite(home)
    with serving(home) as served, ScriptedDevice(mosquitto.url, code, 1) as anna:
        anna.enrol().join()
        opened, rounds = anna.await_round(1), served.parts.first.rounds
        serial = served.parts.keys.current().descriptor.serial
        assert command(home, "rotate", "keys") == 0
        wait_until(lambda: served.parts.keys.current().descriptor.serial > serial)
        assert command(home, "task", "pause", "default") == 0
        wait_until(lambda: rounds.paused)
        assert anna.send_and_wait(opened, anna.body()).verdict is Verdict.COUNTED
        wait_until(lambda: rounds.current is None)
        wait_until(lambda: not served.parts.store.first.publications.topics("round"))


def test_a_round_waits_no_longer_for_a_device_than_its_updates_take(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(
        tmp_path,
        mosquitto.url,
        "quorum = 1\nwait_for_devices = 2\ndeadline_seconds = 3600.0\nleast_deadline_seconds = 1.0",
    )
    codes = invite(home, 2)
    with (
        serving(home),
        ScriptedDevice(mosquitto.url, codes[0], 1) as anna,
        ScriptedDevice(mosquitto.url, codes[1], 2) as bert,
    ):
        anna.enrol().join()
        bert.enrol().join()
        manifest = anna.await_round(1)
        assert anna.send_and_wait(manifest, anna.body()).verdict is Verdict.COUNTED
        assert bert.take_part(1).verdict is Verdict.COUNTED
        # Bert falls silent: the next rounds do not wait for the hour of the task file. Where this
        # machine is too busy for one, the update that came late makes those after it longer.
        manifest = anna.await_round(2)
        while anna.send_and_wait(manifest, anna.body()).verdict is Verdict.LATE:
            manifest = newest(anna)
        alone = manifest.round
        anna.await_round(alone + 1)
    store = open_store(home)
    rows = {row.round: row for row in store.first.rounds.latest(1000)}
    store.database.close()
    assert all(row.length_seconds == pytest.approx(3600.0) for row in rows.values())
    took = [rows[number].closed_unix_seconds for number in range(2, alone + 1)]
    opened = [rows[number].opened_unix_seconds for number in range(2, alone + 1)]
    assert all(end is not None and end - at < 3600.0 for end, at in zip(took, opened, strict=True))
    assert rows[alone].participants == 1
