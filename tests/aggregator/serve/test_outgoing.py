"""A broker that acknowledges what it may not have retained is shown it again."""

from __future__ import annotations

import threading

import pytest

from aggregator.serve.outgoing import Outgoing
from device_sdk.link.events import Delivery, Outcome


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
