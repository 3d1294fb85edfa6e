"""The link at work, against real brokers."""

from __future__ import annotations

import select
import time
from dataclasses import replace
from pathlib import Path

import pytest

from device_sdk.link import LinkSettings
from device_sdk.link.broker_url import TlsFiles
from device_sdk.link.events import (
    Connected,
    ConnectRefused,
    Disconnected,
    Message,
    MqttVersion,
    Outcome,
    PublishRefused,
    Subscribed,
)
from tests.brokers.authority import Authority
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK, SUSPICIOUS, MakeLink, await_event
from tests.brokers.mosquitto import Mosquitto, password_file
from tests.fakes.waiting import PATIENCE_SECONDS


def test_message_there_and_back_on_mqtt_5(mosquitto: Mosquitto, make_link: MakeLink) -> None:
    link = make_link(mosquitto.url, subscriptions=("a/+",))
    connected = await_event(link, Connected)
    assert connected.version is MqttVersion.V5
    assert connected.limits.receive_maximum == 20  # Mosquitto's default, which paho ignores
    assert await_event(link, Subscribed) == Subscribed("a/+", 1)
    delivery = link.publish("a/b", b"payload")
    assert delivery.wait(PATIENCE_SECONDS) is Outcome.ACKNOWLEDGED
    assert await_event(link, Message) == Message("a/b", b"payload", False)


def test_retained_messages_are_marked(mosquitto: Mosquitto, make_link: MakeLink) -> None:
    sender = make_link(mosquitto.url)
    assert sender.publish("kept", b"1", retain=True).wait(PATIENCE_SECONDS) is Outcome.ACKNOWLEDGED
    receiver = make_link(mosquitto.url, subscriptions=("kept",))
    assert await_event(receiver, Message) == Message("kept", b"1", True)


def test_unsubscribe_ends_a_subscription(mosquitto: Mosquitto, make_link: MakeLink) -> None:
    link = make_link(mosquitto.url, subscriptions=("a", "b"))
    await_event(link, Subscribed)
    await_event(link, Subscribed)
    link.unsubscribe("a")
    link.publish("a", b"unwanted")
    link.publish("b", b"wanted")
    assert await_event(link, Message).payload == b"wanted"


def test_falls_back_to_3_1_1(amqtt_url: str, make_link: MakeLink) -> None:
    link = make_link(amqtt_url, SUSPICIOUS, subscriptions=("a/+",))
    assert await_event(link, Connected).version is MqttVersion.V311
    await_event(link, Subscribed)
    assert link.publish("a/b", b"old").wait(PATIENCE_SECONDS) is Outcome.ACKNOWLEDGED
    assert await_event(link, Message).payload == b"old"


def test_messages_keep_their_order_and_none_is_lost(
    mosquitto: Mosquitto, make_link: MakeLink
) -> None:
    link = make_link(mosquitto.url, subscriptions=("a",))
    await_event(link, Subscribed)
    deliveries = [link.publish("a", b"%d" % number) for number in range(900)]
    received = [await_event(link, Message).payload for _ in range(900)]
    assert received == [b"%d" % number for number in range(900)]
    assert {delivery.wait(PATIENCE_SECONDS) for delivery in deliveries} == {Outcome.ACKNOWLEDGED}


def test_full_queue_of_events_stops_reading_and_drops_nothing(
    mosquitto: Mosquitto, make_link: MakeLink
) -> None:
    small = LinkSettings(event_queue_messages=8, keepalive_seconds=30)
    link = make_link(mosquitto.url, small, subscriptions=("a",))
    await_event(link, Subscribed)
    sender = make_link(mosquitto.url)
    sent = [sender.publish("a", b"%d" % number) for number in range(300)]
    assert {delivery.wait(PATIENCE_SECONDS) for delivery in sent} == {Outcome.ACKNOWLEDGED}
    time.sleep(0.2)
    assert [await_event(link, Message).payload for _ in range(300)] == [
        b"%d" % number for number in range(300)
    ]


def test_tls_with_client_certificate(
    make_mosquitto: MakeMosquitto, make_link: MakeLink, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("server")
    certificate, key = authority.issue("client")
    broker = make_mosquitto(
        f"cafile {authority.ca_file}",
        f"certfile {server[0]}",
        f"keyfile {server[1]}",
        "require_certificate true",
        "allow_anonymous true",
    )
    url = broker.url.replace("mqtt:", "mqtts:")
    link = make_link(url, tls=TlsFiles(authority.ca_file, certificate, key), subscriptions=("a",))
    await_event(link, Subscribed)
    payload = bytes(90_000)  # several TLS records
    link.publish("a", payload)
    assert await_event(link, Message).payload == payload

    stranger = Authority(tmp_path, "other authority")
    wrong = make_link(url, tls=TlsFiles(stranger.ca_file, certificate, key))
    mistrust = await_event(wrong, Disconnected)
    assert mistrust.reason == "tls" and "name its certificate by ca_file" in mistrust.detail
    without = make_link(url, tls=TlsFiles(authority.ca_file))
    assert await_event(without, Disconnected).reason in ("tls", "no-connack")
    assert not without.connected


def test_user_and_password_and_acl(
    make_mosquitto: MakeMosquitto, make_link: MakeLink, tmp_path: Path
) -> None:
    acl = tmp_path / "acl"
    acl.write_text("user anna\ntopic readwrite mine/#\n")
    acl.chmod(0o600)
    passwords = password_file(tmp_path / "passwords", {"anna": "p@ss/word"})
    broker = make_mosquitto(
        "allow_anonymous false", f"password_file {passwords}", f"acl_file {acl}"
    )
    refused = make_link(f"mqtt://anna:wrong@127.0.0.1:{broker.port}")
    answer = await_event(refused, ConnectRefused)
    assert answer.code in (134, 135)
    assert await_event(refused, ConnectRefused).code == answer.code  # tried again, with back-off

    link = make_link(f"mqtt://anna:p%40ss%2Fword@127.0.0.1:{broker.port}")
    await_event(link, Connected)
    assert link.publish("mine/a", b"").wait(PATIENCE_SECONDS) is Outcome.ACKNOWLEDGED
    denied = link.publish("theirs/a", b"")
    assert denied.wait(PATIENCE_SECONDS) is Outcome.REFUSED
    assert await_event(link, PublishRefused).code == 135
    assert "authorized" in denied.detail.lower()


def test_limits_of_the_broker_are_kept(make_mosquitto: MakeMosquitto, make_link: MakeLink) -> None:
    broker = make_mosquitto(
        "allow_anonymous true",
        "max_packet_size 2000",
        "max_inflight_messages 3",
        "retain_available false",
    )
    link = make_link(broker.url)
    limits = await_event(link, Connected).limits
    assert limits.maximum_packet_bytes == 2000
    assert limits.receive_maximum == 3
    too_large = link.publish("a", bytes(2000))
    assert too_large.wait(PATIENCE_SECONDS) is Outcome.REFUSED
    assert await_event(link, PublishRefused).code is None
    assert link.publish("a", b"", retain=True).wait(PATIENCE_SECONDS) is Outcome.REFUSED
    many = [link.publish("a", bytes(1900)) for _ in range(50)]
    assert {delivery.wait(PATIENCE_SECONDS) for delivery in many} == {Outcome.ACKNOWLEDGED}
    assert link.connected


def test_idle_connection_stays_up_and_hardly_wakes(
    mosquitto: Mosquitto, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = make_link(mosquitto.url, replace(QUICK, keepalive_seconds=3))
    await_event(link, Connected)
    waits = 0
    poll = select.poll

    def counted() -> select.poll:
        nonlocal waits
        waits += 1
        return poll()

    monkeypatch.setattr(select, "poll", counted)
    assert link.events(timeout_seconds=6.5) == []  # more than two keep-alives
    assert 0 < waits < 30
    assert link.connected
