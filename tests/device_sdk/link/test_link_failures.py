"""The link when the broker, the network or the program around it fails."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from device_sdk.link.events import (
    Connected,
    Disconnected,
    LinkError,
    Message,
    MqttVersion,
    Outcome,
    Stopped,
    Subscribed,
    SubscribeRefused,
)
from device_sdk.link.settings import LinkSettings
from tests.brokers.links import QUICK, SUSPICIOUS, MakeLink, await_event
from tests.brokers.mosquitto import Mosquitto, free_port
from tests.brokers.proxy import Proxy
from tests.brokers.scripted import ScriptedBroker
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until


def test_consumer_that_never_reads_is_disconnected(
    mosquitto: Mosquitto, make_link: MakeLink
) -> None:
    settings = LinkSettings(
        event_queue_messages=2, keepalive_seconds=1, stall_seconds=0.3, backoff_first_seconds=9
    )
    link = make_link(mosquitto.url, settings, subscriptions=("a",))
    await_event(link, Subscribed)
    sender = make_link(mosquitto.url)
    assert {d.wait(PATIENCE_SECONDS) for d in [sender.publish("a", b"x") for _ in range(50)]} == {
        Outcome.ACKNOWLEDGED
    }
    wait_until(lambda: not link.connected)
    # Closed by us, or by the broker that heard nothing: either way it did not stay up.
    assert await_event(link, Disconnected).reason in ("consumer-stalled", "closed")


def test_refused_subscription_is_reported_and_asked_for_again(make_link: MakeLink) -> None:
    with ScriptedBroker(grants={"secret": [0x87, 0x80, 1]}) as broker:
        link = make_link(broker.url, subscriptions=("secret", "open"))
        first = await_event(link, SubscribeRefused)
        assert (first.topic_filter, first.code) == ("secret", 135)
        second = await_event(link, SubscribeRefused)
        assert (second.topic_filter, second.code) == ("secret", 128)
        assert 0 < first.retry_seconds <= QUICK.backoff_first_seconds
        assert 0 < second.retry_seconds <= 2 * QUICK.backoff_first_seconds
        assert await_event(link, Subscribed) == Subscribed("secret", 1)
        # On the connection that there was, and without disturbing what had been granted.
        assert broker.asked == ["secret", "open", "secret", "secret"]


def test_a_refused_wish_is_not_reported_and_not_asked_for_again(make_link: MakeLink) -> None:
    with ScriptedBroker(grants={"wish": [0x87]}) as broker:
        link = make_link(broker.url)
        link.subscribe("wish", optional=True)
        link.subscribe("open")
        assert await_event(link, Subscribed).topic_filter == "open"
        time.sleep(3 * QUICK.backoff_most_seconds)
        assert link.events(timeout_seconds=0.0) == [] and broker.asked == ["wish", "open"]
        broker.grant("wish")
        broker.cut()
        assert await_event(link, Subscribed).topic_filter == "wish"


def test_a_broker_that_hangs_up_on_a_wish_grants_the_rest_at_once_after(
    make_link: MakeLink,
) -> None:
    with ScriptedBroker(hangs_up_on="wish") as broker:
        link = make_link(broker.url)
        link.subscribe("wish", optional=True)
        link.subscribe("open")
        for _ in range(2):
            assert await_event(link, Disconnected).reason == "closed"
            assert await_event(link, Subscribed).topic_filter == "open"
            assert link.connected
            broker.cut()
            assert await_event(link, Disconnected).reason == "closed"
        assert broker.asked[:5] == ["wish", "open", "open", "wish", "open"]


def test_subscriptions_share_packets_and_each_has_an_answer_of_its_own(
    make_link: MakeLink,
) -> None:
    names = tuple(f"t/{number}" for number in range(20))
    with ScriptedBroker(grants={"t/3": [0x87, 1], "t/19": [0x80, 1]}) as broker:
        link = make_link(broker.url, subscriptions=names)
        answers = [await_event(link, SubscribeRefused) for _ in range(2)]
        assert [each.topic_filter for each in answers] == ["t/3", "t/19"]
        wait_until(lambda: len(broker.asked) == 22)
        assert broker.asked[:20] == list(names) and sorted(broker.asked[20:]) == ["t/19", "t/3"]
        assert broker.packets[:3] == [8, 8, 4] == [QUICK.filters_in_packet, 8, 4]


def test_an_answer_to_fewer_subscriptions_ends_the_connection(make_link: MakeLink) -> None:
    with ScriptedBroker(forgets=1) as broker:
        link = make_link(broker.url, subscriptions=("a", "b"))
        end = await_event(link, Disconnected)
        assert end.reason == "protocol" and "1 answers to 2 subscriptions" in end.detail


def test_broker_killed_and_restarted(mosquitto: Mosquitto, make_link: MakeLink) -> None:
    link = make_link(mosquitto.url, subscriptions=("a",))
    await_event(link, Subscribed)
    mosquitto.kill()
    assert await_event(link, Disconnected).reason in ("closed", "unreachable")
    assert not link.connected
    waiting = link.publish("a", b"from the queue")
    mosquitto.start()
    again = await_event(link, Connected)
    assert again.version is MqttVersion.V5  # a broken broker is no reason to step down
    assert waiting.wait(PATIENCE_SECONDS) is Outcome.ACKNOWLEDGED
    await_event(link, Subscribed)
    link.publish("a", b"after")
    while await_event(link, Message).payload != b"after":
        pass


def test_how_long_a_broker_was_silent_before_it_acknowledged_is_known(
    mosquitto: Mosquitto, make_link: MakeLink
) -> None:
    link = make_link(mosquitto.url)
    await_event(link, Connected)
    os.kill(mosquitto.pid, signal.SIGSTOP)
    first, second = link.publish("a", b"1"), link.publish("a", b"2")
    time.sleep(0.5)
    os.kill(mosquitto.pid, signal.SIGCONT)
    assert [each.wait(PATIENCE_SECONDS) for each in (first, second)] == [Outcome.ACKNOWLEDGED] * 2
    # Both waited for as long; when the second one's came, the broker had just spoken.
    assert first.silent_seconds > 0.4 and second.silent_seconds < first.silent_seconds


def test_in_flight_publication_is_lost_not_acknowledged(
    mosquitto: Mosquitto, make_link: MakeLink
) -> None:
    proxy = Proxy(mosquitto.port)
    try:
        link = make_link(proxy.url, SUSPICIOUS)
        await_event(link, Connected)
        proxy.freeze()
        delivery = link.publish("a", b"into the void")
        assert delivery.wait(PATIENCE_SECONDS) is Outcome.LOST
        assert await_event(link, Disconnected).reason == "stalled"
        proxy.thaw()
        await_event(link, Connected)
        assert link.publish("a", b"again").wait(PATIENCE_SECONDS) is Outcome.ACKNOWLEDGED
    finally:
        proxy.stop()


def test_idle_half_open_connection_is_torn_down(mosquitto: Mosquitto, make_link: MakeLink) -> None:
    proxy = Proxy(mosquitto.port)
    try:
        link = make_link(proxy.url, SUSPICIOUS)
        await_event(link, Connected)
        proxy.freeze()
        # Nothing is sent but the ping that the keep-alive asks for.
        await_event(link, Disconnected)
    finally:
        proxy.stop()


def test_offline_queue_is_bounded(make_link: MakeLink) -> None:
    settings = LinkSettings(send_queue_messages=3, send_queue_bytes=100)
    link = make_link(f"mqtt://127.0.0.1:{free_port()}", settings)
    assert await_event(link, Disconnected).reason == "unreachable"
    link.publish("a", bytes(60))
    with pytest.raises(LinkError) as full:
        link.publish("a", bytes(60))
    assert full.value.reason == "queue-full"
    waiting = [link.publish("a", b"") for _ in range(2)]
    with pytest.raises(LinkError):
        link.publish("a", b"")
    assert link.stop()
    assert {delivery.outcome for delivery in waiting} == {Outcome.DROPPED}
    with pytest.raises(LinkError) as stopped:
        link.publish("a", b"")
    assert stopped.value.reason == "stopped"


def test_stop_is_quick_while_connecting_backing_off_or_not_started(make_link: MakeLink) -> None:
    hour = 3600.0
    slow = LinkSettings(
        connect_timeout_seconds=hour,
        version_probe_seconds=hour,
        backoff_first_seconds=hour,
        backoff_most_seconds=hour,
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = make_link(f"mqtt://127.0.0.1:{silent.getsockname()[1]}", slow)
        time.sleep(0.1)
        assert link.stop(timeout_seconds=PATIENCE_SECONDS)
    link = make_link(f"mqtt://127.0.0.1:{free_port()}", slow)
    await_event(link, Disconnected)
    assert link.stop(timeout_seconds=PATIENCE_SECONDS)
    assert isinstance(link.events(timeout_seconds=1)[-1], Stopped)
    assert make_link("mqtt://127.0.0.1", start=False).stop()


def test_stop_flushes_what_is_queued(mosquitto: Mosquitto, make_link: MakeLink) -> None:
    link = make_link(mosquitto.url)
    await_event(link, Connected)
    deliveries = [link.publish("a", bytes(1000)) for _ in range(200)]
    assert link.stop(flush_seconds=3)
    assert {delivery.outcome for delivery in deliveries} == {Outcome.ACKNOWLEDGED}


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 50,
        b"\x20\xff\xff\xff\xff\xff",
        b"\x20\x02\x00",
        b"\x20\x02\x00\x01",
        b"HTTP/1.1 400\r\n\r\n",
    ],
)
def test_garbage_instead_of_a_connack_never_ends_the_thread(
    make_link: MakeLink, garbage: bytes
) -> None:
    with ScriptedBroker(connack=garbage) as broker:
        link = make_link(broker.url, SUSPICIOUS)
        await_event(link, Disconnected)
        await_event(link, Disconnected)
        assert not link.connected


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x30\x04\x00\x09ab",  # topic longer than its packet
        b"\x30\x06\x00\x02\xff\xfe\x00x",  # topic is not UTF-8
        b"\x40\x01\x00",
        b"\x90\x00",
        b"\xf0\x7f" + b"\x11" * 127,
        b"\xd0\x05hello",
    ],
)
def test_garbage_in_a_session_never_ends_the_thread(make_link: MakeLink, garbage: bytes) -> None:
    with ScriptedBroker(after=garbage) as broker:
        link = make_link(broker.url)
        await_event(link, Connected)
        await_event(link, Disconnected)
        await_event(link, Connected)
