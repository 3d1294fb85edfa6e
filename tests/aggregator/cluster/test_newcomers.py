"""What a worker knows of devices: nothing until one is heard, and then what the store says."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from aggregator.cluster import worker
from aggregator.cluster.worker import WorkerParts
from aggregator.keys.registry import revoke
from aggregator.serve.broker_links import OTHER_LIMIT
from aggregator.task.cluster import Cell, Cluster
from benchmarks.aggregator.mqtt_client import MiniClient, publish_packet
from device_sdk.link.events import Message, Subscribed, SubscribeRefused
from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.receipts import RecordType, Verdict
from device_sdk.wire.publish.topics import Topics, UpTopic
from device_sdk.wire.seal.handshake import MAX_OPEN_BYTES
from tests.aggregator.cluster.test_same_bits import scatter_home
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.clusters import Coordinated, Threads, coordinated
from tests.fakes.homes import invite, make_home
from tests.fakes.sealed_rounds import Device, HeldLink, SealedRounds
from tests.fakes.waiting import wait_until

ALONE = Cluster((Cell("", None, 1),))
ROUND = "quorum = 1\nwait_for_devices = 1"


def parts_of(running: Coordinated) -> WorkerParts:
    assert isinstance(running.runtime, Threads)
    parts = running.runtime.workers[0]._parts
    assert parts is not None
    return parts


def test_a_flood_of_made_up_topics_costs_few_look_ups(
    mosquitto: Mosquitto,
    tmp_path: Path,
    store_url: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND, store_url=store_url)
    with coordinated(home, ALONE) as running:
        (code,) = invite(home)
        honest = ScriptedDevice(mosquitto.url, code, 1).enrol().join()
        parts = parts_of(running)
        counts = parts._shared.refusals.counts
        asked: list[int] = []
        look_up = parts.registry.look_up

        def counted(handles: Iterable[bytes]) -> list[bytes]:
            wanted = set(handles)
            asked.append(len(wanted))
            return look_up(wanted)

        monkeypatch.setattr(parts.registry, "look_up", counted)
        client = MiniClient(mosquitto.port, "somebody")
        began = time.monotonic()
        made_up = 3000
        for number in range(made_up):
            topic = honest.topics.write(UpTopic(number % 4096, os.urandom(16)))
            client.socket.sendall(publish_packet(topic, bytes(100)))
        assert honest.take_part(1).verdict is Verdict.COUNTED
        wait_until(lambda: counts["unknown-handle"] + counts["too-many"] >= made_up)
        seconds = time.monotonic() - began
        assert len(asked) <= seconds / worker._LOOK_UP_SECONDS + 2
        assert sum(asked) <= made_up, "each is looked up once, and nobody who is known"
        # One topic alone has a small part of what there is for all.
        before = counts["unknown-handle"]
        began = time.monotonic()
        topic = honest.topics.write(UpTopic(0, os.urandom(16)))
        client.socket.sendall(publish_packet(topic, bytes(100)) * 1000)
        known = counts["too-many"]
        wait_until(lambda: counts["too-many"] >= known + 900)
        seconds = time.monotonic() - began
        most = OTHER_LIMIT.burst + OTHER_LIMIT.per_second * seconds + 1
        assert counts["unknown-handle"] - before <= most
        client.socket.close()
        honest.disconnect()


def test_a_row_goes_with_the_session_and_comes_back_with_the_next(
    mosquitto: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_SWEEP_SECONDS", 0.05)
    home = make_home(tmp_path, mosquitto.url, ROUND)
    with coordinated(home, ALONE) as running:
        codes = invite(home, 3)
        parts = parts_of(running)
        device = ScriptedDevice(mosquitto.url, codes[0], 1).enrol().join()
        ScriptedDevice(mosquitto.url, codes[1], 2).enrol().disconnect()
        assert device.take_part(1).verdict is Verdict.COUNTED
        device_id = device.require_grant().device_id
        held = parts.registry
        assert [row.device_id for row in held.devices()] == [device_id]
        parts.table.end(device_id)
        wait_until(lambda: len(held) == 0)
        assert device_id not in parts._marks._highest
        manifest, before = device.await_round(2), device.sessions.in_use
        device.send(device.identity_for(manifest), device.body())
        device.wait_for(lambda: device.sessions.in_use not in (before, None))
        assert device.take_part(2).verdict is Verdict.COUNTED
        assert [row.device_id for row in held.devices()] == [device_id]
        device.disconnect()


def test_who_is_revoked_while_its_row_is_read_has_no_session_for_long(
    mosquitto: Mosquitto,
    tmp_path: Path,
    store_url: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND, store_url=store_url)
    with coordinated(home, ALONE) as running:
        (code,) = invite(home)
        parts = parts_of(running)
        device = ScriptedDevice(mosquitto.url, code, 1).enrol()
        read = parts.registry._devices.by_handles
        revoked: list[bytes] = []

        def then_revoked(handles: list[bytes]) -> Iterable[object]:
            rows = list(read(handles))
            if rows and not revoked:
                store = home.open_store()
                with store.database.transaction():
                    assert revoke(store, rows[0].device_id, 5)
                store.database.close()
                revoked.append(rows[0].device_id)
            return rows

        monkeypatch.setattr(parts.registry._devices, "by_handles", then_revoked)
        device.join()  # by the row that was read
        assert revoked == [device.require_grant().device_id]
        wait_until(lambda: len(parts.table) == 0 and len(parts.registry) == 0)
        counts = parts._shared.refusals.counts
        device.publish_up(device.new_opening().message)
        wait_until(lambda: counts["revoked"] > 0)
        assert len(parts.table) == 0
        device.disconnect()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[SealedRounds]:
    """Two devices without sessions, a worker, and what comes and goes in memory."""
    home = scatter_home(tmp_path / "fleet", 2, "")
    rounds = SealedRounds(home, [Device(0), Device(1)], 1, np.random.default_rng(1))
    with closing(rounds):
        yield rounds


def test_what_waits_for_a_store_that_is_away_is_bounded_in_bytes(
    held: SealedRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parts,), device, topics = held.crew, Device(0), Topics()
    assert isinstance(parts.link, HeldLink)

    def away(handles: Iterable[bytes]) -> list[bytes]:
        raise sqlite3.OperationalError("away")

    look_up = parts.registry.look_up
    monkeypatch.setattr(parts.registry, "look_up", away)
    large = bytes((1, int(RecordType.UPDATE), 0, 0)) + bytes(98_000)
    parts.link.came.append(Message(device.up_topic, large, False))
    for _ in range(99):
        topic = topics.write(UpTopic(0, os.urandom(16)))
        parts.link.came.append(Message(topic, bytes(98_304), False))
    with pytest.raises(sqlite3.OperationalError):
        for _ in range(3):
            parts.turn()
    assert len(parts._newcomers) == 100
    assert sum(len(each.payload) for _, each in parts._newcomers) == 100 * MAX_OPEN_BYTES
    # Enough of it is left to tell a device that it has no session here.
    monkeypatch.setattr(parts.registry, "look_up", look_up)
    parts.link.sent.clear()
    held._now_seconds += 1.0
    parts.turn()
    denials = [each for each in parts.link.sent if each[1][1] == MessageType.NO_SESSION]
    assert [topic for topic, _ in denials] == [device.down_topic]
    assert not parts._newcomers


def test_a_worker_says_which_shards_its_broker_does_not_let_it_hear(
    held: SealedRounds, caplog: pytest.LogCaptureFixture
) -> None:
    (parts,), topics = held.crew, Topics()
    assert isinstance(parts.link, HeldLink)
    filters = [topics.up_filter(shard) for shard in range(300)]
    for again in range(2):
        for each in filters:
            parts.link.came.append(SubscribeRefused(each, 0x87, "not authorized", 5.0 + again))
        while parts.link.came:
            parts.turn()
    said = [each.getMessage() for each in caplog.records if "refuses" in each.getMessage()]
    assert 1 <= len(said) <= 4 and "300 of this worker's subscriptions" in said[-1]
    assert filters[0] in said[0] and "not authorized" in said[0] and "acl.template" in said[0]
    assert set(parts.refused) == set(filters)
    caplog.set_level("INFO")
    for each in filters:
        parts.link.came.append(Subscribed(each, 0))
    while parts.link.came:
        parts.turn()
    assert parts.refused == () and "granted all" in caplog.text
