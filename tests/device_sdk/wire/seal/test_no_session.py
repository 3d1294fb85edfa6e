"""The aggregator's word that a session is not open: read strictly, and meant for one device."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, prefix
from device_sdk.wire.seal import session_table, signature
from device_sdk.wire.seal.admission import _MARGIN, _MISSED_SECONDS, _TRIED, OpenSchedule
from device_sdk.wire.seal.announcement import Presence, PresenceWatch
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.handshake import (
    MESSAGE_BYTES,
    NoSession,
    read_no_session,
    sign_no_session,
)
from device_sdk.wire.seal.signature import Purpose
from tests.fakes.parties import INCARNATION, Clock, Fleet, make_serving
from tests.fakes.refusals import changed_bytes, reason_of

SERVING = make_serving(5)
HANDLE, SESSION = b"h" * 16, b"s" * 8
MESSAGE = sign_no_session(SESSION, INCARNATION, HANDLE, SERVING.descriptor, SERVING.sessions)
LATER = sign_no_session(SESSION, INCARNATION, HANDLE, SERVING.descriptor, SERVING.sessions, 71.25)


def verified(
    message: bytes, handle: bytes = HANDLE, descriptor: Descriptor = SERVING.descriptor
) -> NoSession:
    denial = read_no_session(message)
    denial.verify(handle, descriptor)
    return denial


@given(
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
)
def test_round_trip(session: bytes, life: bytes, handle: bytes) -> None:
    message = sign_no_session(session, life, handle, SERVING.descriptor, SERVING.sessions)
    denial = verified(message, handle)
    assert (denial.session_id, denial.incarnation) == (session, life)
    assert denial.wait_seconds == 0
    assert len(message) == MESSAGE_BYTES == 94


@given(st.floats(min_value=1e-4, max_value=1e8))
def test_a_wait_is_told_in_milliseconds(seconds: float) -> None:
    message = sign_no_session(
        SESSION, INCARNATION, HANDLE, SERVING.descriptor, SERVING.sessions, seconds
    )
    assert len(message) == 94
    told = verified(message).wait_seconds
    assert told > 0 and (0 <= told - seconds < 0.0011 or told == (2**32 - 1) / 1000 < seconds)


@pytest.mark.parametrize("message", [MESSAGE, LATER], ids=["soon", "later"])
def test_every_changed_byte_is_noticed(message: bytes) -> None:
    for place, changed in changed_bytes(message):
        expected = {0: "bad-version", 1: "bad-type"}.get(place, "bad-signature")
        assert reason_of(verified, changed) == expected


def test_it_is_as_long_as_it_is() -> None:
    assert reason_of(verified, MESSAGE[:-1]) == "truncated" == reason_of(verified, b"")
    assert reason_of(verified, MESSAGE + b"\0") == "too-large"
    for message, other in ((MESSAGE, LATER), (LATER, MESSAGE)):
        changed = message[:26] + other[26:30] + message[30:]
        assert reason_of(verified, changed) == "bad-signature", "a wait is nobody else's to change"


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(rest: bytes) -> None:
    for message in (rest, prefix(MessageType.NO_SESSION) + rest):
        with pytest.raises(WireError):
            verified(message)


def test_it_is_meant_for_one_device_and_one_descriptor() -> None:
    assert reason_of(verified, MESSAGE, b"i" * 16) == "bad-signature"
    with pytest.raises(WireError, match="bad-signature"):
        verified(MESSAGE, descriptor=make_serving(6).descriptor)


def test_no_other_signature_of_the_aggregator_serves() -> None:
    said = SERVING.descriptor.digest + HANDLE + SESSION + INCARNATION
    for purpose in Purpose:
        made = signature.sign(SERVING.sessions, purpose, said + bytes(4))
        message = prefix(MessageType.NO_SESSION) + SESSION + INCARNATION + bytes(4) + made
        if purpose is not Purpose.NO_SESSION:
            assert reason_of(verified, message) == "bad-signature"


def test_a_table_denies_a_device_once_in_two_seconds() -> None:
    fleet = Fleet()
    lost = fleet.open().session
    envelope = lost.seal(16, b"an update")
    fleet.table.end(fleet.anna.device_id)
    with pytest.raises(WireError, match="unknown-session"):
        fleet.table.receive(envelope, fleet.anna.device_id)

    def denial(device_id: bytes) -> NoSession:
        message = fleet.table.deny(device_id, HANDLE, envelope)
        return verified(message, descriptor=fleet.descriptor)

    told = denial(fleet.anna.device_id)
    assert (told.session_id, told.incarnation) == (lost.session_id, INCARNATION)
    with pytest.raises(WireError, match="too-many"):
        denial(fleet.anna.device_id)
    assert denial(b"b" * 16) == told, "another device has tokens of its own"
    fleet.clock.seconds += 2.0
    assert denial(fleet.anna.device_id) == told


def test_denials_are_held_to_a_share_of_the_time_that_is_no_open_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet()
    envelope = fleet.open().session.seal(16, b"an update")

    def slow(*said: object) -> bytes:
        fleet.clock.seconds += 0.5
        return b"signed"

    monkeypatch.setattr(session_table, "sign_no_session", slow)

    def denied() -> int:
        count, number = 0, itertools.count()
        while True:
            try:
                fleet.table.deny(next(number).to_bytes(16, "big"), HANDLE, envelope)
            except WireError as error:
                assert error.reason == "busy"
                return count
            count += 1

    assert denied() == 4, "a second of work, and half of the 2 s that it took"
    fleet.clock.seconds += 1.0
    assert denied() == 2, "half of the time"
    fleet.grant(fleet.opening("2").message)


def test_those_who_ask_at_once_are_told_to_come_one_after_the_other() -> None:
    fleet = Fleet()
    envelope = fleet.open().session.seal(16, b"an update")
    fleet.table.end(fleet.anna.device_id)
    fleet.table._schedule._cost_seconds = 0.5 / _MARGIN  # of a half of the time: a second
    fleet.table._schedule._share = 0.5
    fleet.clock.seconds += 1.0

    def told_seconds(number: int) -> float:
        message = fleet.table.deny(number.to_bytes(16, "big"), HANDLE, envelope)
        return verified(message, descriptor=fleet.descriptor).wait_seconds

    assert [told_seconds(number) for number in range(5)] == [0, 0, 2, 3, 4]
    fleet.clock.seconds += 2.5
    assert [told_seconds(number) for number in range(6)] == [0, 0, 0, 0, 1.5, 2.5]


def test_a_device_that_has_a_session_takes_no_place() -> None:
    fleet = Fleet()
    lost = fleet.open().session
    envelope = lost.seal(16, b"an update")
    fleet.table.end(fleet.anna.device_id)
    fleet.table.receive(fleet.open("2").session.seal(16, b""), fleet.anna.device_id)
    for _ in range(5):
        fleet.clock.seconds += 2.0
        fleet.table.deny(fleet.anna.device_id, HANDLE, envelope)
    assert len(fleet.table._schedule) == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("asks"), st.integers(0, 9)),
            st.tuples(st.just("opens"), st.integers(0, 9)),
            # In whole 1/1024 s: sums and differences of times are exact.
            st.tuples(st.just("passes"), st.integers(0, 30 * 1024).map(lambda n: n / 1024)),
            st.tuples(st.just("sweeps"), st.just(0)),
        )
    )
)
def test_a_schedule_gives_out_no_more_places_than_there_are(
    steps: list[tuple[str, float]],
) -> None:
    clock = Clock(100.0)
    schedule = OpenSchedule(0.5, clock)
    schedule._cost_seconds = 1.0 / _MARGIN  # 2 s a place
    held: dict[bytes, float] = {}
    taken = [-2.0]
    for what, value in steps:
        sender = str(value).encode()
        if what == "passes":
            clock.seconds += value
        elif what == "sweeps":
            schedule.sweep()
            schedule._due_seconds = 0.0  # whatever is used of it
            held = {each: at for each, at in held.items() if at > clock() - _MISSED_SECONDS}
            row = clock() + 2.0 * len(held)
            if row < taken[-1] + 2:  # who came unasked has no place in it any more
                taken = [row - 2]
        elif what == "opens":
            schedule.opened(sender, schedule._cost_seconds)
            if held.pop(sender, None) is None:
                taken.append(max(clock(), taken[-1] + 2))
        else:
            if sender not in held:
                held[sender] = max(clock(), taken[-1] + 2)
                taken.append(held[sender])
            left = held[sender] - clock()
            assert schedule.wait_seconds(sender) == (left if left > 1 else 0)
    assert len(schedule) == len(held)
    assert all(later - sooner >= 2 for sooner, later in itertools.pairwise(taken))


def test_before_opens_were_measured_there_are_few_places() -> None:
    clock = Clock()
    schedule = OpenSchedule(0.35, clock)
    for number in range(_TRIED):
        schedule.wait_seconds(b"%d" % number)
    with pytest.raises(WireError, match="busy"):
        schedule.wait_seconds(b"one more")
    schedule.wait_seconds(b"0")
    for number in range(_TRIED):
        schedule.opened(b"%d" % number, 0.01)
        schedule.wait_seconds(b"s%d" % number)
    slowest = max(schedule.wait_seconds(b"t%d" % number) for number in range(1000))
    assert slowest == pytest.approx(1000 * _MARGIN * 0.01 / 0.35, rel=0.1)
    missed = OpenSchedule(0.35, clock)
    for number in range(_TRIED):
        missed.wait_seconds(b"%d" % number)
    clock.seconds += 61.0
    missed.sweep()
    assert missed.wait_seconds(b"one more") == 0


def test_a_schedule_goes_by_what_opens_cost() -> None:
    clock = Clock()
    schedule = OpenSchedule(0.35, clock)
    for number in range(1000):
        schedule.opened(b"%d" % number, 0.007)
        clock.seconds += 1.0
    waits = [schedule.wait_seconds(b"s%d" % number) for number in range(101)]
    assert waits[-1] == pytest.approx(100 * _MARGIN * 0.007 / 0.35, rel=1e-3)


def test_whose_word_counts() -> None:
    watch = PresenceWatch()
    first, second = b"1" * 16, b"2" * 16
    assert not watch.may_deny(first)
    watch.should_reopen(Presence(first, 10))
    watch.session_opened(first)
    watch.should_reopen(Presence(second, 20))
    assert watch.may_deny(first) and watch.may_deny(second)
    watch.session_opened(second)
    watch.should_reopen(Presence(first, 10))  # shown again, and over for long
    assert watch.may_deny(second) and not watch.may_deny(first)
