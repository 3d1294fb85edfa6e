"""Keys that leaked, were rotated out and have expired, in the hands of whoever owns the broker."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from aggregator.home import AggregatorHome as AggregatorHome
from aggregator.keys.folder import (
    current_descriptor,
    initialise,
    read_serving_keys,
    rotate_keys,
)
from device_sdk.enrol import FleetAddress, enrol
from device_sdk.errors import EnrolmentFailed
from device_sdk.home.home import Home as DeviceHome
from device_sdk.link.broker_url import BrokerWay
from device_sdk.link.events import Message
from device_sdk.link.link import Link
from device_sdk.wire.publish.topics import (
    DescriptorTopic,
    EnrolAnswerTopic,
    EnrolRequestTopic,
    PresenceTopic,
    Topics,
)
from device_sdk.wire.seal.admission import TokenBuckets, WorkBudget
from device_sdk.wire.seal.announcement import announce, new_presence
from device_sdk.wire.seal.enrolment import EnrolmentDesk, Token
from device_sdk.wire.seal.enrolment_message import parse_code
from device_sdk.wire.seal.keyring import Keyring, ServingKeys
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.homes import command, invite, make_home, serving
from tests.fakes.waiting import PATIENCE_SECONDS, fails_in_the_end

DAY = 86_400


@dataclass
class Thief:
    """Owns the broker, the old keys and, worse, the new device's code: only the time is against
    it, which it says is that of its keys."""

    keys: ServingKeys
    code: str
    answered: int = 0

    @contextmanager
    def at(self, url: str) -> Iterator[None]:
        """Show the old descriptor and answer under it."""
        topics = Topics()
        link = Link(url, rng=np.random.default_rng(1), clock=time.monotonic, settings=QUICK)
        link.subscribe(topics.write(EnrolRequestTopic()))
        link.start()
        link.publish(
            topics.write(DescriptorTopic()), self.keys.descriptor.message, retain=True
        ).wait(5)
        then = float(self.keys.descriptor.expires_unix_seconds - DAY)
        life = new_presence(int(then))
        presence = announce(life, self.keys.descriptor, self.keys.signing)
        link.publish(topics.write(PresenceTopic()), presence, retain=True)
        buckets = TokenBuckets(100, 100, time.monotonic)
        desk = EnrolmentDesk(
            Keyring([self.keys]),
            life.incarnation,
            buckets,
            WorkBudget(1.0, time.monotonic),
            lambda: then,
        )
        code = parse_code(self.code)
        token = Token(code.token_id, code.secret, int(then) + DAY)
        stopping = threading.Event()

        def answer() -> None:
            while not stopping.is_set():
                for event in link.events(timeout_seconds=0.1):
                    if isinstance(event, Message):
                        outcome = desk.answer(event.payload, token)
                        self.answered += 1
                        topic = topics.write(EnrolAnswerTopic(outcome.mailbox))
                        link.publish(topic, outcome.answer)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            link.stop()


def _aggregator(folder: Path, made_unix_seconds: int) -> AggregatorHome:
    home = AggregatorHome(folder)
    initialise(home, made_unix_seconds, os.urandom)
    return home


def _stolen(home: AggregatorHome, at_unix_seconds: int) -> ServingKeys:
    """What lies in the folder of keys, copied before it was rotated out."""
    store = home.open_store()
    keys = read_serving_keys(home, store, lambda: float(at_unix_seconds))[-1]
    store.database.close()
    return keys


def _join(url: str, code: str, folder: Path, seconds: float = PATIENCE_SECONDS) -> None:
    home = DeviceHome(folder, create=True)
    try:
        enrol(
            home,
            FleetAddress(BrokerWay.parse(url)),
            code,
            clock=time.monotonic,
            rng=np.random.default_rng(2),
            timeout_seconds=seconds,
            link_settings=QUICK,
        )
    finally:
        home.close()


@pytest.mark.parametrize("rotated_days_ago", [400, 1])
def test_keys_that_were_rotated_out_enrol_no_new_device(
    mosquitto: Mosquitto, tmp_path: Path, rotated_days_ago: int
) -> None:
    now = int(time.time())
    made = now - (rotated_days_ago + 2) * DAY
    home = _aggregator(tmp_path / "aggregator", made)
    stolen = _stolen(home, made)
    store = home.open_store()
    rotate_keys(home, store, now - rotated_days_ago * DAY, os.urandom)
    store.database.close()
    [code] = invite(home)
    thief = Thief(stolen, code)
    with thief.at(mosquitto.url):
        fails_in_the_end(
            lambda seconds: _join(mosquitto.url, code, tmp_path / "device", seconds),
            EnrolmentFailed, "old", 2.0,
        )  # fmt: skip
    assert not thief.answered, "not even a request is sent under old keys"


def test_keys_that_expired_enrol_no_new_device_though_none_came_after_them(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    now = int(time.time())
    home = _aggregator(tmp_path / "aggregator", now - 800 * DAY)
    thief = Thief(_stolen(home, now - 800 * DAY), code := invite(home)[0])
    with thief.at(mosquitto.url):
        fails_in_the_end(
            lambda seconds: _join(mosquitto.url, code, tmp_path / "device", seconds),
            EnrolmentFailed, "old", 2.0,
        )  # fmt: skip
    assert not thief.answered


def test_an_unused_code_of_before_leads_to_the_keys_and_the_root_of_today(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url)
    [code] = invite(home)
    began = int(time.time())
    for what in ("keys", "root", "root"):
        assert command(home, "rotate", what) == 0
    with serving(home):
        _join(mosquitto.url, code, tmp_path / "device")
    store = home.open_store()
    held = current_descriptor(store)
    store.database.close()
    joined = DeviceHome(tmp_path / "device")
    membership = joined.membership.load()
    assert membership.root_fingerprint == held.root_fingerprint
    assert joined.membership.descriptor(held.root_fingerprint) == held
    assert joined.membership.signed_time() >= began, "no later time falls below this one"
    joined.close()
