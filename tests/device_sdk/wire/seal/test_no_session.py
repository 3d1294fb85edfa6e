"""The aggregator's word that a session is not open: read strictly, and meant for one device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, prefix
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.admission import WorkBudget
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.no_session import (
    MESSAGE_BYTES,
    NoSession,
    read_no_session,
    sign_no_session,
)
from device_sdk.wire.seal.presence import Presence, PresenceWatch
from device_sdk.wire.seal.signature import Purpose
from tests.fakes.parties import INCARNATION, Fleet, make_serving

SERVING = make_serving(5)
HANDLE, SESSION = b"h" * 16, b"s" * 8
MESSAGE = sign_no_session(SESSION, INCARNATION, HANDLE, SERVING.descriptor, SERVING.signing)


def verified(
    message: bytes, handle: bytes = HANDLE, descriptor: Descriptor = SERVING.descriptor
) -> NoSession:
    denial = read_no_session(message)
    denial.verify(handle, descriptor, signature.public_key(descriptor.signing))
    return denial


def reason_of(message: bytes, handle: bytes = HANDLE) -> str:
    with pytest.raises(WireError) as caught:
        verified(message, handle)
    return caught.value.reason


@given(
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
)
def test_round_trip(session: bytes, life: bytes, handle: bytes) -> None:
    message = sign_no_session(session, life, handle, SERVING.descriptor, SERVING.signing)
    denial = verified(message, handle)
    assert (denial.session_id, denial.incarnation) == (session, life)
    assert len(message) == MESSAGE_BYTES == 90


def test_every_changed_byte_is_noticed() -> None:
    for place in range(MESSAGE_BYTES):
        changed = bytearray(MESSAGE)
        changed[place] ^= 1
        expected = {0: "bad-version", 1: "bad-type"}.get(place, "bad-signature")
        assert reason_of(bytes(changed)) == expected


def test_it_is_as_long_as_it_is() -> None:
    assert reason_of(MESSAGE[:-1]) == "truncated" == reason_of(b"")
    assert reason_of(MESSAGE + b"\x00") == "too-large"


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(rest: bytes) -> None:
    for message in (rest, prefix(MessageType.NO_SESSION) + rest):
        with pytest.raises(WireError):
            verified(message)


def test_it_is_meant_for_one_device_and_one_descriptor() -> None:
    assert reason_of(MESSAGE, b"i" * 16) == "bad-signature"
    with pytest.raises(WireError, match="bad-signature"):
        verified(MESSAGE, descriptor=make_serving(6).descriptor)


def test_no_other_signature_of_the_aggregator_serves() -> None:
    said = SERVING.descriptor.digest + HANDLE + SESSION + INCARNATION
    for purpose in Purpose:
        made = signature.sign(SERVING.signing, purpose, said)
        message = prefix(MessageType.NO_SESSION) + SESSION + INCARNATION + made
        if purpose is not Purpose.NO_SESSION:
            assert reason_of(message) == "bad-signature"


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


def test_denials_are_held_to_the_share_of_the_opens() -> None:
    fleet = Fleet()
    envelope = fleet.open().session.seal(16, b"an update")
    fleet.table._budget = WorkBudget(0.1, fleet.clock)

    def slow(count: int) -> bytes:
        fleet.clock.seconds += 10.0  # all of the burst, and more
        return bytes(count)

    fleet.table._random_bytes = slow
    fleet.grant(fleet.opening("2").message)
    with pytest.raises(WireError, match="busy"):
        fleet.table.deny(fleet.anna.device_id, HANDLE, envelope)


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
