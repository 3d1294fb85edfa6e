"""A broker that acknowledges what it may not have retained is shown it again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from aggregator.publish.mirror import ChunkMirror
from aggregator.serve.outgoing import Outgoing
from device_sdk.link.events import Delivery, Outcome
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
