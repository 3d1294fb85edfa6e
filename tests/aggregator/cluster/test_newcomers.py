"""What a worker knows of devices: nothing until one is heard, and then what the store says."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from aggregator.cluster import worker
from aggregator.cluster.worker import WorkerParts
from aggregator.keys.registry import revoke
from aggregator.serve.broker_links import OTHER_LIMIT
from aggregator.task.cluster import Cell, Cluster
from benchmarks.aggregator.mqtt_client import MiniClient, publish_packet
from device_sdk.wire.publish.receipts import Verdict
from device_sdk.wire.publish.topics import UpTopic
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.clusters import Coordinated, Threads, coordinated
from tests.fakes.homes import invite, make_home
from tests.fakes.waiting import wait_until

ALONE = Cluster((Cell("", None, 1),))
ROUND = "quorum = 1\nwait_for_devices = 1\ndeadline_seconds = 600.0"


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
