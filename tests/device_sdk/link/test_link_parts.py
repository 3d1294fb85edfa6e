"""The parts of the link that need no broker."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.link.broker_url import BrokerUrl, TlsFiles, parse_broker_url
from device_sdk.link.events import (
    EventQueue,
    Message,
    MqttVersion,
    Subscribed,
    Subscriptions,
    VersionChoice,
)
from device_sdk.link.link import Link, WakeUp
from device_sdk.link.settings import LinkSettings
from device_sdk.system.clock import Backoff


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mqtt://broker", BrokerUrl("broker", 1883, False)),
        ("mqtts://broker/", BrokerUrl("broker", 8883, True)),
        ("mqtts://u:p%40s%2F@[::1]:99", BrokerUrl("::1", 99, True, "u", "p@s/")),
        ("mqtt://u@broker:1", BrokerUrl("broker", 1, False, "u")),
        ("ws://broker:9001", BrokerUrl("broker", 9001, False, path="/mqtt")),
        ("ws://broker/", BrokerUrl("broker", 80, False, path="/")),
        ("wss://u:p@[::1]/a?b=c", BrokerUrl("::1", 443, True, "u", "p", "/a?b=c")),
    ],
)
def test_urls(text: str, expected: BrokerUrl) -> None:
    assert parse_broker_url(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "broker:1883",
        "http://b",
        "mqtt://",
        "mqtt://b:0",
        "mqtt://b:99999",
        "mqtt://b:x",
        "mqtt://b/topic",
        "mqtt://b?x",
        "mqtt://:secret@b",
        "mqtt://u:secret@b/x",
        "mqtt://[::1",
        "ws://",
        "wss://b/a#b",
        "ws://b/caf\u00e9",
        "ws://b/a b",
        "wss://b\u00e9",
        "https://b/mqtt",
    ],
)
def test_bad_urls_are_refused_without_their_password(text: str) -> None:
    with pytest.raises(ValueError, match="expected mqtt://host") as caught:
        parse_broker_url(text)
    assert "secret" not in str(caught.value)


def test_password_stays_out_of_logs() -> None:
    url = parse_broker_url("mqtts://u:secret@[::1]")
    assert "secret" not in repr(url)
    assert str(url) == "mqtts://[::1]:8883"
    url = parse_broker_url("wss://u:secret@b/mqtt?token=secret")
    assert "secret" not in f"{url!r} {url}"
    assert str(url) == "wss://b:443/mqtt"


def test_tls_files_are_checked_when_the_link_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without certificate_file"):
        TlsFiles(key_file=tmp_path)
    nonsense = tmp_path / "ca.pem"
    for expected in (nonsense, nonsense):
        with pytest.raises(ValueError, match=r"ca\.pem"):
            TlsFiles(ca_file=expected).context()
        nonsense.write_text("not a certificate")
    with pytest.raises(ValueError, match="use mqtts"):
        Link("mqtt://b", rng=np.random.default_rng(0), clock=lambda: 0.0, tls=TlsFiles())


@pytest.mark.parametrize(
    "wrong",
    [
        {"in_flight": 0},
        {"keepalive_seconds": 70_000},
        {"stall_seconds": 0},
        {"stall_seconds": float("nan")},
        {"backoff_most_seconds": 0.1},
        {"maximum_packet_bytes": 10},
    ],
)
def test_settings_name_what_is_wrong(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LinkSettings(**wrong)  # type: ignore[arg-type]


def test_backoff_doubles_jitters_and_is_capped() -> None:
    backoff = Backoff(np.random.default_rng(0), first_seconds=1, most_seconds=8)
    waits = [backoff.next_seconds() for _ in range(2000)]
    for wait, ceiling in zip(waits, [1, 2, 4, *[8] * 1997], strict=True):
        assert ceiling / 10 <= wait <= ceiling
    assert np.std(waits[3:]) > 1
    backoff.reset()
    assert backoff.next_seconds() <= 1
    with pytest.raises(ValueError, match="0 < first <= most"):
        Backoff(np.random.default_rng(0), first_seconds=2, most_seconds=1)


def test_two_links_do_not_share_a_client_id() -> None:
    links = [
        Link("mqtt://b", rng=np.random.default_rng(seed), clock=lambda: 0.0) for seed in (1, 2)
    ]
    assert links[0].client_id != links[1].client_id
    assert all(len(link.client_id) == 22 for link in links)
    assert all(link.stop() for link in links)


def test_version_steps_down_at_once_and_comes_back() -> None:
    choice = VersionChoice()
    assert choice.rejected()
    assert choice.current is MqttVersion.V311
    assert not choice.rejected()
    assert choice.current is MqttVersion.V5
    choice.accepted()
    assert [choice.rejected() for _ in range(2)] == [False, False]
    assert choice.current is MqttVersion.V5  # proven: not given up for a broker that restarts
    assert choice.rejected()
    assert choice.current is MqttVersion.V311


@given(st.lists(st.one_of(st.integers(0, 40), st.none()), max_size=60))
def test_queue_keeps_order_and_pauses_between_full_and_half(steps: list[int | None]) -> None:
    room: list[int] = []
    queue = EventQueue(most_messages=8, most_bytes=200, on_room=lambda: room.append(1))
    oracle: list[Message] = []
    paused = False
    for step in steps:
        if step is None:
            taken = queue.take(3, 0)
            assert taken == oracle[:3]
            del oracle[:3]
        else:
            oracle.append(Message("t", bytes(step), False))
            queue.put(oracle[-1])
        size = sum(len(message.payload) + 1 for message in oracle)
        if len(oracle) >= 8 or size >= 200:
            paused = True
        elif paused and step is None and len(oracle) <= 4 and size <= 100:
            paused = False
            assert room.pop() == 1
        assert queue.paused is paused
    assert room == []


def test_a_topic_is_crowded_when_half_is_full_and_several_are_its_own() -> None:
    queue = EventQueue(most_messages=20, most_bytes=10_000, on_room=lambda: None)
    for number in range(9):
        queue.put(Message("flood", b"%d" % number, False))
        assert not queue.crowded("flood")
    queue.put(Message("honest", b"", False))
    assert queue.crowded("flood") and not queue.crowded("honest") and not queue.crowded("new")
    queue.take(1, 0)
    assert not queue.crowded("flood")
    queue.take(100, 0)
    assert queue._by_topic == {}


def test_notices_are_bounded_and_counted() -> None:
    queue = EventQueue(most_messages=1, most_bytes=1, on_room=lambda: None)
    for _ in range(5000):
        queue.put(Subscribed("t", 1))
    assert queue.dropped == 5000 - 4096
    assert len(queue.take(10_000, 0)) == 4096


def test_take_waits_for_the_first_event() -> None:
    queue = EventQueue(most_messages=1, most_bytes=1, on_room=lambda: None)
    timer = threading.Timer(0.05, queue.put, [Subscribed("t", 1)])
    timer.start()
    assert queue.take(5, 5) == [Subscribed("t", 1)]
    assert queue.take(5, 0.01) == []
    timer.join()


def some_subscriptions() -> Subscriptions:
    rng = np.random.default_rng(0)
    return Subscriptions(lambda: Backoff(rng, first_seconds=1, most_seconds=4))


def test_subscriptions_tell_a_connection_all_and_later_only_changes() -> None:
    subscriptions = some_subscriptions()
    subscriptions.add("a", 1)
    subscriptions.add("b", 0)
    assert subscriptions.remove("b") and not subscriptions.remove("b")
    assert subscriptions.take_changes(0.0) == []
    assert subscriptions.connected() == [("a", 1)]
    subscriptions.add("c", 1)
    subscriptions.remove("a")
    assert subscriptions.take_changes(0.0) == [("c", 1), ("a", None)]
    assert subscriptions.take_changes(0.0) == []
    subscriptions.disconnected()
    subscriptions.remove("c")
    assert subscriptions.take_changes(0.0) == [] and subscriptions.connected() == []


def test_refused_subscriptions_are_due_again_after_waits_that_grow_to_a_limit() -> None:
    subscriptions = some_subscriptions()
    subscriptions.add("a", 1)
    subscriptions.connected()
    now, waits = 100.0, []
    for _ in range(200):
        waits.append(subscriptions.refused("a", now))
        assert subscriptions.next_seconds() == now + waits[-1]
        assert subscriptions.take_changes(now + 0.99 * waits[-1]) == []
        now += waits[-1]
        assert subscriptions.take_changes(now) == [("a", 1)]
        assert subscriptions.take_changes(now) == [] and subscriptions.next_seconds() == math.inf
    assert waits[0] <= 1 and waits[1] <= 2 and 2 < max(waits) <= 4
    subscriptions.granted("a")
    assert subscriptions.refused("a", now) <= 1  # from the first wait again


def test_a_refused_subscription_that_nobody_wants_any_more_is_not_asked_for() -> None:
    subscriptions = some_subscriptions()
    subscriptions.connected()
    for name in "abc":
        subscriptions.add(name, 1)
        subscriptions.refused(name, 0.0)
    assert len(subscriptions.take_changes(0.0)) == 3
    subscriptions.remove("a")
    subscriptions.refused("a", 0.0)  # the answer came after the withdrawal
    subscriptions.add("b", 0)  # asked for now, so not once more later
    assert subscriptions.take_changes(9.0) == [("a", None), ("b", 0), ("c", 1)]
    # A new connection is told all there is, at once.
    subscriptions.refused("b", 0.0)
    subscriptions.disconnected()
    assert subscriptions.connected() == [("b", 0), ("c", 1)]
    assert subscriptions.take_changes(9.0) == []


def test_an_optional_subscription_stands_in_nobody_s_way() -> None:
    subscriptions = some_subscriptions()
    subscriptions.add("wish", 1, optional=True)
    subscriptions.add("a", 1)
    assert subscriptions.connected() == [("wish", 1), ("a", 1)]
    assert subscriptions.refused("wish", 0.0) is None and subscriptions.refused("a", 0.0)
    assert subscriptions.take_changes(99.0) == [("a", 1)]
    # Refused, it is asked for at the next connection; hung up on, at the one after it.
    subscriptions.disconnected()
    assert len(subscriptions.connected()) == 2
    subscriptions.disconnected(["wish", "a"])
    assert subscriptions.connected() == [("a", 1)]
    subscriptions.disconnected()
    assert subscriptions.connected() == [("wish", 1), ("a", 1)]
    # What is withdrawn and asked for anew without that word is like any other.
    subscriptions.remove("wish")
    subscriptions.add("wish", 1)
    assert subscriptions.refused("wish", 0.0) is not None


def test_one_byte_wakes_until_the_thread_looks_anew() -> None:
    waker = WakeUp()
    for _ in range(3):
        waker.wake()
    assert waker.socket.recv(10) == b"w"
    waker.wake()
    with pytest.raises(BlockingIOError):
        waker.socket.recv(10)
    waker.wake(again=True)
    assert waker.socket.recv(10) == b"w"
    waker.rearm()
    waker.wake()
    assert waker.socket.recv(10) == b"w"
    waker.close()
    waker.wake(again=True)


def test_sleep_ends_when_woken_for_its_reason_only() -> None:
    waker = WakeUp()
    asked: list[bool] = []

    def until() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    waker.wake()
    timer = threading.Timer(0.05, waker.wake, kwargs={"again": True})
    timer.start()
    waker.sleep(30, time.monotonic, until)
    assert asked == [False, False, True]
    waker.sleep(0.01, time.monotonic, lambda: False)
    timer.join()
    waker.close()
