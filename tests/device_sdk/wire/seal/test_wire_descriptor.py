from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, decode, encode, prefix
from device_sdk.wire.seal import hpke, signature
from device_sdk.wire.seal.announcement import (
    Presence,
    PresenceWatch,
    announce,
    new_presence,
    read_announcement,
)
from device_sdk.wire.seal.broadcast import (
    MOST_KEYS,
    GroupKey,
    find_group_key,
    new_group_key,
)
from device_sdk.wire.seal.descriptor import (
    DELEGATION_BYTES,
    MOST_SUCCESSIONS,
    SUCCESSION_BYTES,
    Descriptor,
    DescriptorSeen,
    Succession,
    extend_line,
    make_delegation,
    make_descriptor,
    make_succession,
    read_delegation,
    read_descriptor,
    read_line,
    root_of,
)
from device_sdk.wire.seal.handshake import SessionReply
from device_sdk.wire.seal.keyring import Keyring, serving_keys
from device_sdk.wire.seal.keys import fingerprint
from device_sdk.wire.seal.signature import Purpose
from tests.fakes.parties import (
    DELEGATION_EXPIRES,
    EXPIRES,
    NOW,
    SeededBytes,
    delegation_of,
    key_from,
    make_serving,
)

SERVING = make_serving(5)
DESCRIPTOR = SERVING.descriptor
ROOT = fingerprint(DESCRIPTOR.root)
BODY_AT = 3 + DELEGATION_BYTES + signature.SIGNATURE_BYTES


def reason_of(
    message: bytes, root: bytes = ROOT, seen: DescriptorSeen | None = None, least: int = 0
) -> str:
    with pytest.raises(WireError) as caught:
        read_descriptor(message, root, seen, least)
    return caught.value.reason


def under(line: Sequence[Succession], root: str = "root", serial: int = 5) -> Descriptor:
    """A descriptor at the end of a line of successions."""
    return make_descriptor(
        key_from("delegate"),
        delegation_of(root),
        serial,
        NOW,
        EXPIRES,
        DESCRIPTOR.signing,
        DESCRIPTOR.sessions,
        DESCRIPTOR.hpke,
        line,
    )


def line_of(*names: str) -> list[Succession]:
    """Successions from root to root."""
    return [
        make_succession(key_from(old), key_from(new).public_key().public_bytes_raw())
        for old, new in pairwise(names)
    ]


def print_of(name: str) -> bytes:
    return fingerprint(key_from(name).public_key().public_bytes_raw())


def test_round_trip() -> None:
    assert read_descriptor(DESCRIPTOR.message, ROOT) == DESCRIPTOR
    assert (DESCRIPTOR.serial, DESCRIPTOR.expires_unix_seconds) == (5, EXPIRES)
    assert DESCRIPTOR.root_fingerprint == ROOT == root_of(DESCRIPTOR.message)


@pytest.mark.parametrize("names", [("root",), ("older", "old", "root")])
def test_every_changed_byte_is_refused(names: tuple[str, ...]) -> None:
    made = under(line_of(*names))
    message, root = made.message, print_of(names[0])
    for place in range(len(message)):
        changed = bytearray(message)
        changed[place] ^= 0x10
        if place < 2:
            assert reason_of(bytes(changed), root) == ["bad-version", "bad-type"][place]
        elif place == 2:
            assert reason_of(bytes(changed), root) == "bad-succession"
        else:
            reasons = {"bad-signature", "wrong-root", "bad-succession", "bad-key"}
            assert reason_of(bytes(changed), root) in reasons
    assert reason_of(message[:-1], root) == "bad-signature"
    assert reason_of(message + b"x", root) == "bad-signature"
    assert reason_of(message[:90], root) == "truncated"
    assert reason_of(message[:BODY_AT], root) == "truncated"
    assert reason_of(bytes(5000), root) == "too-large"


def signed_by_delegate(body: bytes) -> bytes:
    head = b"\x00" + DESCRIPTOR.delegation.to_bytes()
    signed = signature.sign(key_from("delegate"), Purpose.DESCRIPTOR, head + body)
    return prefix(MessageType.DESCRIPTOR) + head + signed + body


def test_a_signed_but_malformed_body_is_refused() -> None:
    body = DESCRIPTOR.message[BODY_AT:]
    assert signed_by_delegate(body) == DESCRIPTOR.message
    assert reason_of(signed_by_delegate(body + b"\x00")) == "bad-cbor"
    assert reason_of(signed_by_delegate(b"\xa0")) == "wrong-fields"
    assert reason_of(signed_by_delegate(body.replace(b"serial\x05", b"serial\x20"))) == "bad-field"
    for key in (DESCRIPTOR.signing, DESCRIPTOR.sessions):
        assert reason_of(signed_by_delegate(body.replace(key, bytes(32)))) == "bad-key"
    mlkem = DESCRIPTOR.hpke[:1184]
    assert reason_of(signed_by_delegate(body.replace(mlkem, b"\xff" * 1184))) == "bad-key"


def test_what_the_root_did_not_allow_is_refused() -> None:
    body = DESCRIPTOR.message[BODY_AT:]
    beyond = body.replace(b"serial\x05", b"serial\x19\x03\xe9")
    assert reason_of(signed_by_delegate(beyond)) == "bad-delegation"
    late = cbor.encode(DELEGATION_EXPIRES + 1)
    changed = body.replace(cbor.encode(EXPIRES), late)
    assert reason_of(signed_by_delegate(changed)) == "bad-delegation"
    with pytest.raises(ValueError, match="did not allow"):
        make_descriptor(
            key_from("delegate"),
            DESCRIPTOR.delegation,
            1001,
            NOW,
            EXPIRES,
            DESCRIPTOR.signing,
            DESCRIPTOR.sessions,
            DESCRIPTOR.hpke,
        )
    with pytest.raises(ValueError, match="signature"):
        make_descriptor(
            key_from("another delegate"),
            DESCRIPTOR.delegation,
            5,
            NOW,
            EXPIRES,
            DESCRIPTOR.signing,
            DESCRIPTOR.sessions,
            DESCRIPTOR.hpke,
        )


def test_the_ends_of_every_range_are_within_it() -> None:
    last_time, last_serial = 2**63 - 1, 2**40 - 1
    public = (DESCRIPTOR.signing, DESCRIPTOR.sessions, DESCRIPTOR.hpke)
    narrow = delegation_of("root", last_serial, last_serial, 1)
    made = make_descriptor(key_from("delegate"), narrow, last_serial, 0, 1, *public)
    assert read_descriptor(made.message, ROOT, least_serial=last_serial) == made
    wide = delegation_of("root", 1, last_serial, last_time)
    assert read_delegation(wide.to_bytes()) == wide
    made = make_descriptor(key_from("delegate"), wide, 1, NOW, last_time, *public)
    assert read_descriptor(made.message, ROOT) == made
    with pytest.raises(ValueError, match="expires"):
        delegation_of("root", 1, last_serial, last_time + 1)
    for key in range(3):
        with pytest.raises(ValueError, match=r"of (32|1,216) bytes"):
            wrong = [*public[:key], b"", *public[key + 1 :]]
            make_descriptor(key_from("delegate"), wide, 1, NOW, last_time, *wrong)
    for serial, expires in ((last_serial + 1, EXPIRES), (5, last_time + 1)):
        body = cbor.encode(
            {
                "expires": expires,
                "hpke": public[2],
                "issued": NOW,
                "serial": serial,
                "sessions": public[1],
                "signing": public[0],
            }
        )
        assert reason_of(signed_by_delegate(body)) == "bad-field"


def test_a_line_that_leaves_no_room_for_a_body_is_refused() -> None:
    made = under(line_of("old", "root"))
    body_at = BODY_AT + SUCCESSION_BYTES
    assert reason_of(made.message[:body_at], print_of("old")) == "truncated"
    assert reason_of(made.message[: body_at + 1], print_of("old")) == "bad-signature"


def test_a_root_is_looked_for_at_the_places_of_roots_alone() -> None:
    made = under(line_of("old", "middle", "root"))
    roots = {print_of(name) for name in ("old", "middle", "root")}
    assert root_of(made.message) == print_of("root")
    for at in range(BODY_AT):
        window = fingerprint(made.message[at : at + 32])
        if window not in roots:
            assert reason_of(made.message, window) == "wrong-root"


def test_another_root_and_a_small_order_root_are_refused() -> None:
    assert reason_of(make_serving(5, root="stranger").descriptor.message) == "wrong-root"
    point = b"\x01" + bytes(31)
    message = DESCRIPTOR.message.replace(DESCRIPTOR.root, point)
    assert reason_of(message, fingerprint(point)) == "bad-key"


def test_serials_never_fall_and_never_name_two_descriptors() -> None:
    seen = DescriptorSeen(DESCRIPTOR.root, 5, DESCRIPTOR.digest)
    assert read_descriptor(DESCRIPTOR.message, ROOT, seen).serial == 5
    assert read_descriptor(make_serving(6).descriptor.message, ROOT, seen).serial == 6
    assert reason_of(make_serving(4).descriptor.message, seen=seen) == "serial-fell"
    assert reason_of(DESCRIPTOR.message, least=6) == "serial-fell"
    same_serial = make_descriptor(
        key_from("delegate"),
        DESCRIPTOR.delegation,
        5,
        NOW,
        EXPIRES + 1,
        DESCRIPTOR.signing,
        DESCRIPTOR.sessions,
        DESCRIPTOR.hpke,
    )
    assert reason_of(same_serial.message, seen=seen) == "serial-reused"


def test_who_trusts_any_root_of_the_line_follows_to_its_end() -> None:
    names = [f"root {n}" for n in range(MOST_SUCCESSIONS + 1)]
    made = under(line_of(*names), names[-1])
    for name in names:
        assert read_descriptor(made.message, print_of(name)) == made
        assert made.follows_from(print_of(name))
    assert reason_of(made.message, print_of("root")) == "wrong-root"
    assert not made.follows_from(print_of("root"))
    longer = extend_line(line_of(*names), line_of(names[-1], "root")[0])
    assert len(longer) == MOST_SUCCESSIONS
    assert reason_of(under(longer).message, print_of(names[0])) == "wrong-root"
    assert read_descriptor(under(longer).message, print_of(names[1])).root == DESCRIPTOR.root
    with pytest.raises(ValueError, match="successions"):
        under(line_of(*names, "root"))


def test_a_line_with_a_gap_a_branch_or_a_way_back_is_refused() -> None:
    for wrong in (
        line_of("a", "b"),  # does not reach the root
        [*line_of("a", "b"), *line_of("c", "root")],
        [*line_of("a", "b"), *line_of("a", "root")],
        line_of("root", "b", "root"),
        line_of("a", "b", "a", "root"),
        line_of("root", "root"),
    ):
        with pytest.raises(ValueError, match="successions"):
            under(wrong)
    stranger = replace(line_of("a", "root")[0], signed=line_of("b", "root")[0].signed)
    with pytest.raises(ValueError, match="signature"):
        under([stranger])


def test_a_root_that_was_left_is_never_gone_back_to() -> None:
    follower = read_descriptor(under(line_of("old", "root")).message, print_of("old"))
    trusted = follower.root_fingerprint
    for message in (
        make_serving(900, root="old").descriptor.message,
        under(line_of("old", "other"), "other").message,  # the old root's second word
    ):
        assert reason_of(message, trusted) == "wrong-root"


def test_serials_are_a_root_s_own() -> None:
    """Who held the old root could have used them all up."""
    old = make_serving(1000, root="old").descriptor
    seen = DescriptorSeen(old.root, old.serial, old.digest)
    made = under(line_of("old", "root"), serial=5)
    assert read_descriptor(made.message, print_of("old"), seen) == made
    assert reason_of(made.message, print_of("old"), seen, 6) == "serial-fell"


def test_delegations_and_successions_out_of_range_are_refused() -> None:
    for first, last, expires in [(0, 5, NOW), (6, 5, NOW), (1, 2**40, NOW), (1, 2, 0)]:
        with pytest.raises(ValueError, match=r"serial|expires"):
            delegation_of("root", first, last, expires)
    with pytest.raises(ValueError, match="32 bytes"):
        make_delegation(key_from("root"), b"", 1, 2, NOW)
    with pytest.raises(ValueError, match="32 bytes"):
        make_succession(key_from("root"), b"")
    for data in (bytes(127), bytes(128 * 9)):
        with pytest.raises(WireError) as caught:
            read_line(data, DESCRIPTOR.root)
        assert caught.value.reason == "bad-succession"
    part = bytearray(DESCRIPTOR.delegation.signed_part())
    part[64:72] = bytes(8)
    signed = signature.sign(key_from("root"), Purpose.DELEGATION, bytes(part))
    for data, reason in [(bytes(part) + signed, "bad-delegation"), (b"", "bad-delegation")]:
        with pytest.raises(WireError) as caught:
            read_delegation(data)
        assert caught.value.reason == reason


def test_expiry_is_judged_apart() -> None:
    DESCRIPTOR.require_unexpired(EXPIRES - 1)
    with pytest.raises(WireError) as caught:
        DESCRIPTOR.require_unexpired(EXPIRES)
    assert caught.value.reason == "descriptor-expired"


def test_values_out_of_range_are_refused_at_construction() -> None:
    signing, sessions, public = DESCRIPTOR.signing, DESCRIPTOR.sessions, DESCRIPTOR.hpke
    for arguments in [
        (0, NOW, EXPIRES, signing, sessions, public),
        (2**40, NOW, EXPIRES, signing, sessions, public),
        (1, NOW, 0, signing, sessions, public),
        (1, EXPIRES, EXPIRES, signing, sessions, public),
        (1, -1, EXPIRES, signing, sessions, public),
        (1, NOW, EXPIRES, b"", sessions, public),
        (1, NOW, EXPIRES, signing, b"", public),
        (1, NOW, EXPIRES, signing, sessions, b""),
        (1, NOW, EXPIRES, signing, signing, public),
    ]:
        with pytest.raises(ValueError, match=r"expected|expiry|one key"):
            make_descriptor(key_from("delegate"), DESCRIPTOR.delegation, *arguments)


def test_keys_must_belong_to_their_descriptor() -> None:
    signing, sessions, seed = key_from("signing 5"), key_from("sessions 5"), SeededBytes("hpke 5")
    with pytest.raises(ValueError, match="signing key"):
        serving_keys(DESCRIPTOR, sessions, sessions, seed(96))
    with pytest.raises(ValueError, match="sessions' key"):
        serving_keys(DESCRIPTOR, signing, signing, SeededBytes("hpke 5")(96))
    with pytest.raises(ValueError, match="HPKE key"):
        serving_keys(DESCRIPTOR, signing, sessions, bytes(96))
    made = serving_keys(DESCRIPTOR, signing, sessions, SeededBytes("hpke 5")(96))
    sealed = hpke.seal(hpke.public_key(DESCRIPTOR.hpke), b"", b"x")
    assert hpke.unseal(made.hpke, b"", sealed) == b"x"


def test_the_previous_keys_are_honoured_for_their_grace_period() -> None:
    old, new = make_serving(1, until=NOW + 10), make_serving(2)
    ring = Keyring([old, new])
    assert ring.find(1, NOW + 9) is old
    assert ring.find(2, NOW + 99) is new
    for serial, reason in [
        (1, "retired-descriptor"),
        (0, "retired-descriptor"),
        (3, "unknown-descriptor"),
    ]:
        with pytest.raises(WireError) as caught:
            ring.find(serial, NOW + 10)
        assert caught.value.reason == reason
    with pytest.raises(ValueError, match="two sets"):
        Keyring([new, new])
    with pytest.raises(ValueError, match="at least"):
        Keyring([])


def test_presence_round_trip_and_every_changed_byte() -> None:
    presence = new_presence(NOW, SeededBytes("life"))
    message = announce(presence, DESCRIPTOR, SERVING.signing)
    assert read_announcement(Presence, message, DESCRIPTOR) == presence
    for place in range(len(message)):
        changed = bytearray(message)
        changed[place] ^= 1
        with pytest.raises(WireError) as caught:
            read_announcement(Presence, bytes(changed), DESCRIPTOR)
        expected = ["bad-version", "bad-type"][place] if place < 2 else "bad-signature"
        assert caught.value.reason == expected
    with pytest.raises(WireError) as caught:
        read_announcement(Presence, message, make_serving(6).descriptor)
    assert caught.value.reason == "bad-signature"
    with pytest.raises(ValueError, match="16 bytes"):
        Presence(b"", NOW)
    for cut, reason in ((66, "truncated"), (67, "bad-signature")):
        with pytest.raises(WireError) as caught:
            read_announcement(Presence, message[:cut], DESCRIPTOR)
        assert caught.value.reason == reason


def test_a_presence_s_time_has_63_bits_at_both_ends() -> None:
    for started in (0, 2**63 - 1):
        presence = Presence(bytes(16), started)
        message = announce(presence, DESCRIPTOR, SERVING.signing)
        assert read_announcement(Presence, message, DESCRIPTOR) == presence
    for started in (-1, 2**63):
        with pytest.raises(ValueError, match="started"):
            Presence(bytes(16), started)
        body = cbor.encode({"incarnation": bytes(16), "started": started})
        signed = signature.sign(SERVING.signing, Purpose.PRESENCE, DESCRIPTOR.digest + body)
        with pytest.raises(WireError) as caught:
            read_announcement(Presence, prefix(MessageType.PRESENCE) + signed + body, DESCRIPTOR)
        assert caught.value.reason == "bad-field"


def test_a_presence_asks_for_one_session_and_an_old_one_for_none() -> None:
    first, second = Presence(b"a" * 16, NOW), Presence(b"b" * 16, NOW + 5)
    watch = PresenceWatch()
    watch.session_opened(first.incarnation)
    assert not watch.should_reopen(first)
    assert watch.should_reopen(second)
    assert not watch.should_reopen(second), "asked already"
    watch.session_opened(second.incarnation)
    assert not watch.should_reopen(second)
    assert not watch.should_reopen(first), "an old presence shown again"
    same_second = Presence(b"c" * 16, NOW + 5)
    assert watch.should_reopen(same_second)
    # The broker alternates two real presences of the same second: no loop.
    watch.session_opened(same_second.incarnation)
    asked = [watch.should_reopen(p) for p in (second, same_second) * 5]
    assert asked == [False] * 10


def test_the_newest_life_and_the_one_shown_last_are_asked_by_turns() -> None:
    watch = PresenceWatch()
    assert watch.incarnation(0) is watch.incarnation(1) is None
    first, second = Presence(b"a" * 16, NOW), Presence(b"b" * 16, NOW + 5)
    watch.should_reopen(second)
    assert {watch.incarnation(unanswered) for unanswered in range(4)} == {second.incarnation}
    watch.should_reopen(first)  # shown again; or the clock was set back
    asked = [watch.incarnation(unanswered) for unanswered in range(4)]
    assert asked == [second.incarnation, first.incarnation] * 2
    same_second = Presence(b"c" * 16, NOW + 5)
    watch.should_reopen(same_second)
    assert {watch.incarnation(unanswered) for unanswered in range(4)} == {same_second.incarnation}


def test_presences_of_one_second_are_bounded() -> None:
    watch = PresenceWatch()
    asked = [watch.should_reopen(Presence(i.to_bytes(16, "big"), NOW)) for i in range(1000)]
    assert sum(asked) == 64
    assert watch.should_reopen(Presence(b"z" * 16, NOW + 1))


def test_group_keys_are_found_by_their_epoch() -> None:
    keys = tuple(new_group_key(epoch, SeededBytes(str(epoch))) for epoch in (1, 2, 9))
    assert find_group_key(keys, 2) is keys[1]
    with pytest.raises(WireError) as caught:
        find_group_key(keys, 3)
    assert caught.value.reason == "unknown-epoch"
    assert keys[0].key.hex() not in repr(keys[0])
    for epoch in (-1, 2**63):
        with pytest.raises(ValueError, match="epoch"):
            GroupKey(epoch, bytes(32))


def test_sixteen_group_keys_of_rising_epochs_travel_and_no_more() -> None:
    def reply(*epochs: int) -> SessionReply:
        keys = tuple(GroupKey(epoch, bytes(32)) for epoch in epochs)
        return SessionReply(bytes(8), bytes(32), bytes(16), NOW, keys)

    most = (*range(MOST_KEYS - 1), 2**63 - 1)
    assert decode(SessionReply, encode(reply(*most))) == reply(*most)
    for wrong in ((*range(MOST_KEYS + 1),), (2, 1), (1, 1)):
        with pytest.raises(ValueError, match="by rising epoch"):
            reply(*wrong)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_random_bytes_never_escape_as_another_error(data: bytes, root: bytes) -> None:
    for message in (data, prefix(MessageType.DESCRIPTOR) + data):
        with pytest.raises(WireError):
            read_descriptor(message, fingerprint(message[3:35]))
        with contextlib.suppress(WireError):
            root_of(message)
    for parse in (read_delegation, lambda raw: read_line(raw, DESCRIPTOR.root)):
        with contextlib.suppress(WireError):
            assert parse(data) == ()
    for message in (data, prefix(MessageType.PRESENCE) + data):
        with pytest.raises(WireError):
            read_announcement(Presence, message, DESCRIPTOR)


@given(st.binary(max_size=300))
def test_random_signed_bodies_never_escape_as_another_error(body: bytes) -> None:
    with pytest.raises(WireError):
        read_descriptor(signed_by_delegate(body), ROOT)
    signed = signature.sign(SERVING.signing, Purpose.PRESENCE, DESCRIPTOR.digest + body)
    with pytest.raises(WireError):
        read_announcement(Presence, prefix(MessageType.PRESENCE) + signed + body, DESCRIPTOR)
