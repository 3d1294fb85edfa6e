"""How long a worker has an update before it is committed: what its death would cost."""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from aggregator.cluster import worker
from aggregator.store.reports import Late
from benchmarks.aggregator.mqtt_client import MiniClient, publish_packet
from device_sdk.link.events import Event, Message
from device_sdk.wire.publish.receipts import Verdict
from device_sdk.wire.publish.topics import UpTopic
from tests.aggregator.cluster.test_newcomers import ALONE, ROUND, parts_of
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.clusters import coordinated
from tests.fakes.homes import invite, make_home
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.faults.taken_in import is_update


def test_an_update_does_not_wait_for_all_that_came_with_it(
    mosquitto: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    with coordinated(home, ALONE) as running:
        (code,) = invite(home)
        device = ScriptedDevice(mosquitto.url, code, 1).enrol().join()
        manifest = device.await_round(1)
        parts = parts_of(running)
        (followed,) = parts.board.served
        wait_until(lambda: followed.rounds.current is not None)
        slow = device.topics.write(UpTopic(0, os.urandom(16)))
        take, receive = parts.link.events, parts._uplink.receive
        waiting: list[Event] = []
        counted: list[int] = []
        patched = threading.Event()

        def take_all_at_once(**named: Any) -> list[Event]:
            patched.set()
            waiting.extend(take(**named))
            messages = [each for each in waiting if isinstance(each, Message)]
            slow_ones = [each for each in messages if each.topic == slow]
            updates = [each for each in messages if is_update(each)]
            if not counted and (len(slow_ones) < 2 or not updates):
                return []
            found = sorted(waiting, key=lambda each: each in slow_ones)
            waiting.clear()
            return found

        def receive_slowly(message: Message) -> Any:
            if message.topic == slow:
                counted.append(followed.ingest.counted)
                time.sleep(1.2 * worker._HOLD_SECONDS)
            return receive(message)

        monkeypatch.setattr(parts._uplink, "receive", receive_slowly)
        monkeypatch.setattr(parts.link, "events", take_all_at_once)
        assert patched.wait(PATIENCE_SECONDS)
        client = MiniClient(mosquitto.port, "somebody")
        client.socket.sendall(publish_packet(slow, bytes(100)) * 2)
        assert device.send_and_wait(manifest, device.body()).verdict is Verdict.COUNTED
        assert counted[1] == 1, "before the second of what came with it"
        client.socket.close()
        device.disconnect()


def test_who_came_late_is_written_down_with_the_heartbeat(
    mosquitto: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    with coordinated(home, ALONE) as running:
        (code,) = invite(home)
        device = ScriptedDevice(mosquitto.url, code, 1).enrol().join()
        device.await_round(1)
        parts = parts_of(running)
        (followed,) = parts.board.served
        wait_until(lambda: followed.rounds.current is not None)
        row = followed.rounds.current
        assert row is not None
        # The coordinator would take it up at its next look.
        monkeypatch.setattr(Late, "take", lambda late: {})
        begin, begun = parts._store.database.transaction, list[int]()

        def transaction(*, shared: bool = False) -> AbstractContextManager[None]:
            begun.append(threading.get_ident())
            return begin(shared=shared)

        monkeypatch.setattr(parts._store.database, "transaction", transaction)
        for _ in range(3):
            followed.rounds.came_late(row, device.require_grant().device_id, updates=True)
        assert threading.get_ident() not in begun
        with closing(home.open_store().database) as database:
            query = "SELECT count(*) FROM late_arrivals"
            wait_until(lambda: database.row(query) == (1,))
        device.disconnect()
