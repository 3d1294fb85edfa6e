"""The aggregator's messages to itself: what they say of a broker, and when they say nothing."""

from __future__ import annotations

import threading

import pytest

from aggregator.serve.broker_links import LossProbe, SizeProbe
from device_sdk.link.events import Delivery, Outcome, ServerLimits

NONCE = bytes(range(16))


class Desk:
    """A probe, its clock, and a broker that a test speaks for."""

    def __init__(self) -> None:
        self.now_seconds = 50.0
        self.outcome: Outcome | None = Outcome.ACKNOWLEDGED
        self.sent: list[bytes] = []
        self.probe = LossProbe(self._send, NONCE, lambda: self.now_seconds)

    def _send(self, payload: bytes) -> Delivery:
        self.sent.append(payload)
        delivery = Delivery("probe", payload, 1, False, threading.Condition())
        delivery.outcome = self.outcome
        return delivery

    def round(self, *, comes: bool, seconds: float = 5.0, behind: bool = False) -> None:
        self.probe.turn(behind)
        if comes:
            self.probe.came(self.sent[-1])
        self.now_seconds += seconds
        self.probe.turn(behind) if behind else None


@pytest.fixture
def desk() -> Desk:
    made = Desk()
    made.round(comes=True)
    return made


def test_a_healthy_broker_loses_nothing(desk: Desk) -> None:
    for _ in range(20):
        desk.round(comes=True)
    assert desk.probe.lost == 0 and len(desk.sent) == 21


def test_what_a_later_one_overtook_was_lost(desk: Desk) -> None:
    desk.round(comes=False)
    desk.round(comes=False)
    assert desk.probe.lost == 0
    desk.round(comes=True)
    assert desk.probe.lost == 2


def test_what_never_comes_was_lost_unless_we_are_behind_ourselves(desk: Desk) -> None:
    for _ in range(4):
        desk.round(comes=False)
    desk.probe.turn(False)
    assert desk.probe.lost == 1
    other = Desk()
    other.round(comes=True)
    for _ in range(40):
        other.round(comes=False, behind=True)
    assert other.probe.lost == 0


def test_slow_is_not_lost(desk: Desk) -> None:
    for _ in range(3):
        desk.round(comes=False)
    for payload in desk.sent[1:]:
        desk.probe.came(payload)
    assert desk.probe.lost == 0


@pytest.mark.parametrize("outcome", [None, Outcome.REFUSED, Outcome.LOST])
def test_what_was_not_acknowledged_is_not_judged(desk: Desk, outcome: Outcome | None) -> None:
    desk.outcome = outcome
    for _ in range(20):
        desk.round(comes=False)
    assert desk.probe.lost == 0


def test_nothing_is_judged_where_none_ever_comes_back() -> None:
    desk = Desk()
    for _ in range(50):
        desk.round(comes=False)
    assert desk.probe.lost == 0


def test_a_lost_connection_proves_nothing(desk: Desk) -> None:
    desk.round(comes=False)
    desk.probe.interrupted()
    for _ in range(3):
        desk.round(comes=True)
    assert desk.probe.lost == 0


def test_others_messages_and_repetitions_say_nothing(desk: Desk) -> None:
    desk.round(comes=False)
    for payload in (
        b"",
        b"x" * 24,
        bytes(16) + desk.sent[-1][16:],
        desk.sent[0],
        desk.sent[-1][16:],
    ):
        desk.probe.came(payload)
    assert desk.probe.lost == 0
    desk.probe.came(desk.sent[-1])
    desk.round(comes=True)
    assert desk.probe.lost == 0


@pytest.mark.parametrize("late_seconds", [0, 1, 5, 11])
@pytest.mark.parametrize("most", [8_000, 60_000, None])
def test_what_a_broker_drops_is_found_however_late_it_comes_back(
    most: int | None, late_seconds: int
) -> None:
    """A thousand devices may stand before it in the broker's queue."""
    now, on_its_way = 0, list[tuple[int, bytes]]()

    def send(payload: bytes) -> Delivery:
        delivery = Delivery("probe", payload, 1, False, threading.Condition())
        delivery.outcome = Outcome.ACKNOWLEDGED
        if most is None or len(payload) < most:
            on_its_way.append((now + late_seconds, payload))
        return delivery

    probe, told = SizeProbe(send, "probe", NONCE, lambda: now), set[int | None]()
    probe.connected(ServerLimits(65_535, None, 1, True, None))
    for now in range(200):
        while on_its_way and on_its_way[0][0] <= now:
            probe.came(on_its_way.pop(0)[1])
        if probe.turn(comes_back=True):
            told.add(probe.packet_bytes)
    found = probe.packet_bytes
    assert found is None if most is None else found is not None and most / 2.5 < found <= most
    assert len(told) == 1 or late_seconds > 3
    assert probe.turn(comes_back=True) and not on_its_way, "it asks no more"
