"""A broker that acknowledges what it may not have retained is shown it again."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.publish.mirror import ChunkMirror
from aggregator.serve.broker_links import CellLinks
from aggregator.serve.outgoing import Outgoing
from device_sdk.link.events import Delivery, LinkError, Outcome
from device_sdk.wire.codec.message import MessageType, prefix
from tests.fakes.waiting import PATIENCE_SECONDS


class Desk:
    """Takes everything, and acknowledges when the test says so."""

    def __init__(self) -> None:
        self.sent: list[Delivery] = []

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1
    ) -> Delivery:
        self.sent.append(Delivery(topic, payload, qos, retain, threading.Condition()))
        return self.sent[-1]

    def acknowledge(self, silent_seconds: float) -> None:
        self.sent[-1].silent_seconds = silent_seconds
        self.sent[-1].outcome = Outcome.ACKNOWLEDGED


class Shelf:
    """One message of the store's."""

    def message(self, topic: str) -> bytes:
        return b"stored"

    def superseded(self) -> list[str]:
        return []


class Broker(Desk):
    """One of several: what it retains, and whether it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.connected = True
        self.retained: dict[str, bytes] = {}

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1
    ) -> Delivery:
        delivery = super().publish(topic, payload, retain=retain, qos=qos)
        self.retained[topic] = payload
        if not payload:
            del self.retained[topic]
        delivery.outcome = Outcome.ACKNOWLEDGED
        return delivery


class Publications:
    """The store's messages by topic; None: to be cleared."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes | None] = {}

    def message(self, topic: str) -> bytes | None:
        return self.rows.get(topic)

    def superseded(self) -> list[str]:
        return [topic for topic, message in self.rows.items() if message is None]

    def cleared(self, topics: Iterable[str]) -> None:
        for topic in topics:
            if self.rows.get(topic, b"") is None:
                del self.rows[topic]

    @property
    def current(self) -> dict[str, bytes]:
        return {topic: message for topic, message in self.rows.items() if message is not None}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["publish", "supersede", "first", "second", "pump"]), max_size=40))
def test_each_broker_holds_what_is_current_and_nothing_else_whichever_is_away(
    steps: list[str],
) -> None:
    brokers, store = {"first": Broker(), "second": Broker()}, Publications()
    outgoing = Outgoing(CellLinks(list(brokers.values())), store)  # type: ignore[arg-type]

    def pump(times: int = 3) -> None:
        for _ in range(times):
            outgoing.pump()

    def reach(name: str) -> None:
        brokers[name].connected ^= True
        if brokers[name].connected:
            outgoing.connected()
            outgoing.announce([], sorted(store.current))

    for number, step in enumerate(steps):
        topic = f"topic-{number % 3}"
        if step == "publish":
            store.rows[topic] = b"%d" % number
            outgoing.announce([], [topic])
        elif step == "supersede":
            if topic in store.rows:
                store.rows[topic] = None
                outgoing.announce([], [])
        elif step == "pump":
            pump(1)
        else:
            reach(step)
    pump()
    for broker in brokers.values():
        assert not broker.connected or broker.retained == store.current
    for name in [name for name, broker in brokers.items() if not broker.connected]:
        reach(name)
    pump()
    assert all(broker.retained == store.rows for broker in brokers.values()), "forgotten at last"


def test_a_broker_that_comes_and_goes_keeps_nothing_from_one_that_is_there() -> None:
    """It is there anew each time that a third of what is retained has been sent."""

    class Narrow(Broker):
        left = 0

        def publish(
            self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1
        ) -> Delivery:
            if not self.left:
                raise LinkError("queue-full", "as it is")
            self.left -= 1
            return super().publish(topic, payload, retain=retain, qos=qos)

    here, comes = Narrow(), Broker()
    store = Publications()
    store.rows |= {f"topic-{number}": b"message" for number in range(9)}
    outgoing = Outgoing(CellLinks([here, comes]), store)  # type: ignore[arg-type,list-item]
    for _ in range(3):
        outgoing.connected()
        outgoing.announce([], sorted(store.current))
        here.left = 3
        outgoing.pump()
    assert here.retained == store.current
    here.left = 100
    outgoing.pump()
    assert comes.retained == store.current and not outgoing.busy


def test_the_store_is_not_asked_at_each_turn_for_what_waits_for_a_broker_that_is_away() -> None:
    brokers, store, asked = [Broker(), Broker()], Publications(), []
    superseded = store.superseded
    store.superseded = lambda: asked.append(1) or superseded()  # type: ignore
    outgoing = Outgoing(CellLinks(brokers), store)  # type: ignore[arg-type]
    brokers[1].connected = False
    store.rows = dict.fromkeys(map(str, range(1000)))
    for _ in range(200):
        outgoing.pump()
    assert len(brokers[0].sent) == 1000 and len(asked) < 8 and len(store.rows) == 1000


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def outgoing(desk: Desk) -> Outgoing:
    return Outgoing(desk, Shelf())  # type: ignore[arg-type]


def test_what_was_acknowledged_in_time_is_sent_once(desk: Desk, outgoing: Outgoing) -> None:
    outgoing.announce([("a", b"1")], [])
    outgoing.pump()
    desk.acknowledge(3.9)
    for _ in range(3):
        outgoing.pump()
    assert [(each.topic, each.payload) for each in desk.sent] == [("a", b"1")]


def test_what_was_acknowledged_after_a_long_silence_is_sent_again_and_not_for_ever(
    desk: Desk, outgoing: Outgoing
) -> None:
    outgoing.announce([("a", b"1")], [])
    outgoing.pump()
    for _ in range(6):
        desk.acknowledge(5.0)
        outgoing.pump()
    assert [(each.topic, each.payload) for each in desk.sent] == [("a", b"1")] * 4
    # Each announcement has its own.
    outgoing.announce([], ["a"])
    outgoing.pump()
    desk.acknowledge(5.0)
    outgoing.pump()
    assert [each.payload for each in desk.sent[4:]] == [b"stored", b"stored"]
    assert all(each.retain for each in desk.sent)


def test_what_waits_for_its_acknowledgement_is_forgotten_with_the_connection(
    desk: Desk, outgoing: Outgoing
) -> None:
    outgoing.announce([("a", b"1")], [])
    outgoing.pump()
    outgoing.connection_lost()
    desk.acknowledge(5.0)
    outgoing.pump()
    assert len(desk.sent) == 1


def test_a_chunk_store_that_hangs_holds_up_one_manifest_for_half_a_minute_and_then_nothing(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aggregator.publish.mirror._MOST_BYTES", 3000)
    monkeypatch.setattr("aggregator.serve.outgoing._MOST_UNMIRRORED", 10)
    now, goes_on = [0.0], threading.Event()
    mirror = ChunkMirror(str(tmp_path), lambda: now[0])
    monkeypatch.setattr(mirror._files, "write", lambda *_: goes_on.wait(PATIENCE_SECONDS))
    held: dict[str, bytes] = {}

    class Held(Shelf):
        def message(self, topic: str) -> bytes:
            return held[topic]

    outgoing = Outgoing(desk, Held(), mirror)  # type: ignore[arg-type]

    def shown(round_number: int) -> list[str]:
        chunks = {f"{round_number}/{index}": prefix(MessageType.CHUNK) for index in range(6)}
        held.update({topic: kind + topic.encode() * 300 for topic, kind in chunks.items()})
        held[f"{round_number}/manifest"] = prefix(MessageType.MANIFEST)
        already = len(desk.sent)
        outgoing.announce([], [each for each in held if each.startswith(f"{round_number}/")])
        outgoing.pump()
        return [each.topic for each in desk.sent[already:]]

    assert shown(1) == [f"1/{index}" for index in range(6)], "chunks wait for nothing"
    now[0] = 29.0
    outgoing.pump()
    assert outgoing.busy
    now[0] = 30.0
    outgoing.pump()
    assert not outgoing.busy and desk.sent[-1].topic == "1/manifest"
    for round_number in range(2, 9):
        assert shown(round_number)[-1] == f"{round_number}/manifest"
        assert not outgoing.busy
    assert len(outgoing._unmirrored) <= 10
    goes_on.set()
    outgoing.stop()
