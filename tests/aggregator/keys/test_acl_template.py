"""The ACL that ships lets the protocol through, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from device_sdk.device import Device
from device_sdk.errors import EnrolmentRefused
from device_sdk.link.events import Message, Outcome, Subscribed
from device_sdk.link.link import Link
from device_sdk.wire.publish.receipts import Verdict
from device_sdk.wire.publish.topics import DownTopic, ManifestTopic, UpTopic
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK, MakeLink, await_event
from tests.brokers.mosquitto import RECOMMENDED, password_file
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import invite, make_home, serving
from tests.fakes.waiting import PATIENCE_SECONDS

TEMPLATE = Path(__file__).parents[3] / "aggregator" / "acl.template"


def test_devices_reach_their_own_topics_only(
    make_mosquitto: MakeMosquitto, make_link: MakeLink, tmp_path: Path
) -> None:
    users = {"tessera-aggregator": "server", "fleet": "devices"}
    passwords = password_file(tmp_path / "passwords", users)
    broker = make_mosquitto(
        "allow_anonymous false", f"password_file {passwords}", f"acl_file {TEMPLATE}", *RECOMMENDED
    )
    address = broker.url.removeprefix("mqtt://")
    home = make_home(tmp_path, f"mqtt://tessera-aggregator:server@{address}", "quorum = 2")
    fleet_url = f"mqtt://fleet:devices@{address}"
    with serving(home) as served:
        first, second = invite(home, 2)
        with ScriptedDevice(fleet_url, first) as anna, ScriptedDevice(fleet_url, second) as bert:
            anna.enrol().join()
            bert.enrol().join()
            manifest = anna.await_round(1)
            assert anna.send_and_wait(manifest, anna.body()).verdict is Verdict.COUNTED
            anna.fetch_catalogue(manifest)
            stranger = make_link(fleet_url)
            stranger.subscribe(anna.topics.write(DownTopic(bert.require_grant().handle)))
            await_event(stranger, Subscribed)
            before = served.service.bytes_received
            # Another device's uplink: the broker drops it, so the aggregator never sees it.
            topic = anna.topics.write(UpTopic(0, bert.require_grant().handle))
            anna.require_link().publish(topic, b"\x01\x05 not mine")
            assert bert.take_part(1).verdict is Verdict.COUNTED
            seen = served.service.bytes_received - before
            # 16 bytes of clear header more than a multiple of the padding: bert's envelope only.
            assert seen < 400
            # The receipt went to bert alone, although somebody else subscribed to it too.
            assert not [e for e in stranger.events(timeout_seconds=0.3) if isinstance(e, Message)]


@pytest.mark.parametrize("login", ["fleet:devices@", ""], ids=["user", "without"])
def test_who_enrols_is_told_the_names_that_exist(
    make_mosquitto: MakeMosquitto, tmp_path: Path, login: str
) -> None:
    users = {"tessera-aggregator": "server", "fleet": "devices"}
    passwords = password_file(tmp_path / "passwords", users)
    broker = make_mosquitto(
        "allow_anonymous true", f"password_file {passwords}", f"acl_file {TEMPLATE}", *RECOMMENDED
    )
    address = broker.url.removeprefix("mqtt://")
    home = make_home(tmp_path, f"mqtt://tessera-aggregator:server@{address}")
    (code,) = invite(home, 1)
    with serving(home):
        url, folder = f"mqtt://{login}{address}", tmp_path / "device"
        with pytest.raises(EnrolmentRefused, match="there is task 'default' with cohort 'all'"):
            Device.enrol(
                url,
                code,
                folder,
                task="films",
                link_settings=QUICK,
                timeout_seconds=PATIENCE_SECONDS,
            )
        Device.enrol(
            url, code, folder, link_settings=QUICK, timeout_seconds=PATIENCE_SECONDS
        ).close()


def test_whoever_comes_without_a_user_may_enrol_and_no_more(
    make_mosquitto: MakeMosquitto, make_link: MakeLink, tmp_path: Path
) -> None:
    passwords = password_file(tmp_path / "passwords", {"tessera-aggregator": "server"})
    broker = make_mosquitto(
        "allow_anonymous true", f"password_file {passwords}", f"acl_file {TEMPLATE}", *RECOMMENDED
    )
    address = broker.url.removeprefix("mqtt://")
    home = make_home(tmp_path, f"mqtt://tessera-aggregator:server@{address}")
    (code,) = invite(home, 1)
    with serving(home) as served, ScriptedDevice(broker.url, code) as anna:
        anna.enrol()
        before = served.service.bytes_received
        topics, handle = anna.topics, anna.require_grant().handle
        kept = [
            topics.write(ManifestTopic("default", "all")),
            topics.chunk_filter(served.parts.keys.current().descriptor.signing),
        ]
        # With the client id that would be right.
        link = Link(
            broker.url, rng=np.random.default_rng(1), clock=time.monotonic, client_id=handle.hex()
        )
        for topic_filter in (*kept, topics.write(DownTopic(handle)), "tessera/all/presence"):
            link.subscribe(topic_filter)
        link.start()
        try:
            up = link.publish(topics.write(UpTopic(0, handle)), b"\x01\x05 an open")
            assert up.wait(PATIENCE_SECONDS) is Outcome.REFUSED
            answer = link.publish(topics.write(DownTopic(handle)), b"\x01\x06 a reply")
            assert answer.wait(PATIENCE_SECONDS) is Outcome.REFUSED
            messages = [e for e in link.events(timeout_seconds=1) if isinstance(e, Message)]
            messages += [e for e in link.events(timeout_seconds=1) if isinstance(e, Message)]
            assert {message.topic for message in messages} <= {"tessera/all/presence"}
        finally:
            assert link.stop()
        assert served.service.bytes_received == before


def test_each_mosquitto_conf_of_the_docs_has_the_recommended_settings() -> None:
    docs = TEMPLATE.parents[1] / "docs"
    pages = [docs / "aggregator.md", docs / "operating" / "broker" / "mosquitto.md"]
    text = [line for page in pages for line in page.read_text().splitlines()]
    # A further listener, for WebSocket, stands in a file that has them already.
    further = text.count("protocol websockets")
    listeners = sum(line.startswith("listener ") for line in text) - further
    assert listeners >= 2
    assert [text.count(line) for line in RECOMMENDED] == [listeners] * len(RECOMMENDED)
