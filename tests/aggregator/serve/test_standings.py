"""Devices that were away when their labels or the tasks changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aggregator.serve.assembly import World, assemble
from aggregator.serve.standings import FIRST_SECONDS, MOST_SECONDS
from aggregator.store.rows import DeviceRow
from aggregator.task.file import read_task
from device_sdk import Device
from device_sdk.link.events import Message
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.receipts import RecordType, UpdateIdentity, Verdict
from device_sdk.wire.publish.task_messages import Standing
from device_sdk.wire.publish.topics import UpTopic
from device_sdk.wire.seal.announcement import Presence, read_announcement
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import DeviceCredential, SessionOpening
from device_sdk.wire.seal.session import Session
from tests.aggregator.serve.test_service_refusals import wait_until
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.brokers.proxy import Proxy
from tests.fakes.brisk import BRISK
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import command, invite, make_home, serving
from tests.fakes.parties import Clock, make_credential, registered
from tests.fakes.tasks import add_task, task_text
from tests.fakes.waiting import PATIENCE_SECONDS

NORTH = 'only = {site = "north"}'
DAY = 86_400.0
Tasks = list[str] | None


class Aggregator:
    """A serving home without a broker, two devices, and the clock of all."""

    def __init__(self, folder: Path) -> None:
        self.home = make_home(folder, "mqtt://127.0.0.1:1")
        add_task(self.home, "air", task_text(self.home, "air", more=NORTH))
        self.devices = {name: make_credential(name) for name in ("anna", "bert")}
        store = self.home.open_store()
        with store.database.transaction():
            for each in self.devices.values():
                known = registered(each)
                row = (known.device_id, known.identity, known.device_id, known.admission_key)
                store.devices.add(DeviceRow(*row, 0, bytes(8), 0, 1))
        self.clock = Clock(1000.0)
        world = World(self.clock, time.time, np.random.default_rng(1))
        self.parts = assemble(self.home, store, read_task(self.home.task_file), world)
        self.sessions: dict[bytes, Session] = {}
        self.told: list[tuple[float, Tasks]] = []

    def open(self, device: DeviceCredential) -> None:
        """A session, and what follows its reply."""
        descriptor = self.parts.keys.current().descriptor
        life = read_announcement(
            Presence, self.parts.announcements.presence()[1], descriptor
        ).incarnation
        opening = SessionOpening(device, descriptor, Freshness(life, 1), self.clock)
        topic = self.parts.topics.write(UpTopic(0, device.device_id))
        answer = self.parts.uplink.receive(Message(topic, opening.message, retained=False))
        self.sessions[device.device_id] = opening.accept(answer.payload, 0).session
        self.hear(self.parts.standings.opened(device.device_id))

    def hear(self, messages: object) -> None:
        """Note what each device that is there is told, and when."""
        for topic, payload in messages:
            for device_id, session in self.sessions.items():
                if topic.endswith(device_id.hex()):
                    received = session.open(payload)
                    assert received.message_type == RecordType.STANDING
                    tasks = [task for task, _ in decode(Standing, received.payload).tasks]
                    self.told.append((self.clock.seconds, tasks))

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Turns of the loop."""
        end = self.clock.seconds + seconds
        while self.clock.seconds < end and not until():
            self.parts.table.sweep()
            self.hear(self.parts.standings.due())
            self.clock.seconds += 1.0

    def label(self, device: DeviceCredential, site: str) -> None:
        self.parts.store.devices.set_labels(device.device_id, {"site": site})
        self.parts.registry.reload()


@pytest.fixture
def aggregator(tmp_path: Path) -> Aggregator:
    return Aggregator(tmp_path)


@pytest.mark.parametrize("away_seconds", [3.0, 600.0, DAY / 2])
def test_who_was_away_is_told_within_as_long_again(
    aggregator: Aggregator, away_seconds: float
) -> None:
    anna = aggregator.devices["anna"]
    aggregator.open(anna)
    assert [tasks for _, tasks in aggregator.told] == [["default"]]
    aggregator.wait(1200.0)  # it has no reason to say anything, and the session stays its own
    aggregator.label(anna, "north")
    aggregator.wait(away_seconds)
    assert aggregator.told[-1][1] == ["air", "default"]  # lost: nobody was there
    del aggregator.told[:]
    aggregator.wait(DAY, until=lambda: bool(aggregator.told))
    most = min(away_seconds + FIRST_SECONDS, MOST_SECONDS) + 2.0
    assert aggregator.clock.seconds <= 1000.0 + 1200.0 + away_seconds + most
    assert aggregator.told[-1][1] == ["air", "default"]


def test_who_says_something_is_told_once_more_and_then_left_in_peace(
    aggregator: Aggregator,
) -> None:
    anna, standings = aggregator.devices["anna"], aggregator.parts.standings
    aggregator.open(anna)
    aggregator.hear(standings.heard(anna.device_id))
    assert len(aggregator.told) == 2
    aggregator.wait(3600.0)
    aggregator.hear(standings.heard(anna.device_id))
    assert len(aggregator.told) == 2, "nothing is new, and it is there"
    # A round that heard nothing of it, as one that was reached by neither of the two.
    standings.remind([anna.device_id, aggregator.devices["bert"].device_id])
    aggregator.wait(2.0)
    assert len(aggregator.told) == 3
    standings.remind([anna.device_id])
    aggregator.wait(2.0)
    assert len(aggregator.told) == 3, "it is on the list already"


def test_one_message_a_device_and_wait_and_none_for_the_others(aggregator: Aggregator) -> None:
    for device in aggregator.devices.values():
        aggregator.open(device)
        aggregator.hear(aggregator.parts.standings.heard(device.device_id))
    del aggregator.told[:]
    aggregator.label(aggregator.devices["bert"], "north")
    aggregator.wait(12 * 3600.0)
    assert {tuple(tasks or ()) for _, tasks in aggregator.told} == {("air", "default")}
    assert len(aggregator.told) <= 12 * 3600 / MOST_SECONDS + 8


def test_a_device_that_was_away_takes_part_in_what_it_was_given_meanwhile(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    lines = "quorum = 1\nwait_for_devices = 1\npause_seconds = 0.2"
    home = make_home(tmp_path, mosquitto.url, lines)
    add_task(home, "air", task_text(home, "air", lines, more=NORTH))
    (code,) = invite(home)
    proxy = Proxy(mosquitto.port)
    try:
        with (
            serving(home) as served,
            Device.enrol(
                proxy.url,
                code,
                tmp_path / "dev",
                pace=BRISK,
                link_settings=QUICK,
                timeout_seconds=PATIENCE_SECONDS,
            ) as dev,
        ):
            for item in range(5):
                dev.record(f"item-{item}", task="default")
                dev.record(f"air-{item}", task="air")
            dev.start()

            def takes_part() -> dict[str, bool]:
                return {task.name: task.takes_part for task in dev.tasks()}

            ingests = [task.ingest for task in served.parts.tasks.served]
            wait_until(lambda: ingests[0].counted > 0 and not takes_part().get("air"))
            proxy.freeze()
            assert command(home, "devices", "label", dev.device_id[:8], "site=north") == 0
            air = served.parts.tasks.served[1].rounds
            wait_until(lambda: air.current is not None)
            wait_until(lambda: not dev.status(task="default").connected)
            proxy.thaw()
            wait_until(lambda: ingests[1].counted > 0)
            assert takes_part() == {"default": True, "air": True}
            assert len(served.parts.table) == 1, "in the session of before"
    finally:
        proxy.stop()


def test_who_acts_against_its_standing_is_told_again(mosquitto: Mosquitto, tmp_path: Path) -> None:
    brief = "quorum = 1\nwait_for_devices = 1\ndeadline_seconds = 2.0"
    home = make_home(tmp_path, mosquitto.url, brief.replace("devices = 1", "devices = 2"))
    add_task(home, "air", task_text(home, "air", brief, more=NORTH))
    codes = invite(home, 2)
    with (
        serving(home) as served,
        ScriptedDevice(mosquitto.url, codes[0], 1) as anna,
        ScriptedDevice(mosquitto.url, codes[1], 2) as bert,
    ):
        north = bert.enrol().require_grant().device_id.hex()
        assert command(home, "devices", "label", north[:8], "site=north") == 0
        anna.enrol().join()

        def is_told() -> None:
            anna.wait_for(lambda: anna.standing is not None)
            anna.standing = None

        is_told()  # behind the session's reply
        body, late = anna.body(), True
        while late:  # where this machine takes longer than a round
            identity = anna.identity_for(anna.await_round(1))
            late = anna.await_receipt(anna.send(identity, body)).verdict is Verdict.LATE
        is_told()  # behind its first word
        anna.await_round(identity.round + 1)
        is_told()  # a round selected it, and heard nothing
        assert anna.await_receipt(anna.send(identity, body)).verdict is Verdict.COUNTED
        is_told()
        air = served.parts.tasks.served[1].rounds
        wait_until(lambda: air.current is not None)
        assert air.current is not None
        strange = UpdateIdentity(identity.device_id, "air", air.generation, air.current.round)
        receipt = anna.await_receipt(anna.send(strange, body))
        assert receipt.reason == "not-eligible"
        is_told()
