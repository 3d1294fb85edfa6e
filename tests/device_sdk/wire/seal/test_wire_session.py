from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, encode, prefix
from device_sdk.wire.seal import hpke, signature
from device_sdk.wire.seal.admission import AdmissionPurpose, WorkBudget, admission_tag
from device_sdk.wire.seal.descriptor import make_descriptor
from device_sdk.wire.seal.freshness import Freshness, FreshnessMarks
from device_sdk.wire.seal.handshake import (
    DeviceCredential,
    OpenedSession,
    OpenRequest,
    SessionOpening,
    SessionReply,
    encode_reply,
    open_info,
    reply_info,
)
from device_sdk.wire.seal.keyring import Keyring
from device_sdk.wire.seal.session import (
    MAX_LIFETIME_SECONDS,
    MAX_MESSAGES,
    DeviceSessions,
    Direction,
    End,
    EnvelopeCipher,
    Fragment,
    Session,
    derive_session_keys,
)
from device_sdk.wire.seal.session_table import MOST_PENDING, MOST_REPEATS, PENDING_SECONDS
from tests.fakes.parties import (
    EXPIRES,
    INCARNATION,
    NOW,
    Clock,
    Fleet,
    SeededBytes,
    key_from,
    make_credential,
    make_serving,
)
from tests.fakes.refusals import changed_bytes, mutated, reason_of


def pair() -> tuple[Session, Session, Clock]:
    """Both ends of a session with known keys."""
    clock = Clock()
    keys = derive_session_keys(bytes(32), bytes(32), b"open", b"reply")
    device = Session(b"session!", keys, End.DEVICE, clock)
    return device, Session(b"session!", keys, End.AGGREGATOR, clock), clock


def test_a_session_carries_both_ways() -> None:
    fleet = Fleet()
    opened = fleet.open()
    assert opened.incarnation == INCARNATION
    assert opened.time_unix_seconds == NOW
    assert opened.group_keys == fleet.group_keys
    up = opened.session.seal(16, b"update")
    received = fleet.table.receive(up, fleet.anna.device_id)
    assert (received.message_type, received.payload, received.sequence) == (16, b"update", 0)
    down = opened.session.open(fleet.table.seal(fleet.anna.device_id, 17, b"receipt"))
    assert (down.message_type, down.payload) == (17, b"receipt")


def test_a_part_comes_out_with_its_place_in_the_whole() -> None:
    device, aggregator, _ = pair()
    fragment = Fragment(b"message!", 1, 3, 200_000)
    assert aggregator.open(device.seal(16, b"part", fragment)).fragment == fragment
    assert aggregator.open(device.seal(16, b"whole")).fragment is None


def test_every_changed_byte_of_an_open_is_refused_before_public_key_work() -> None:
    fleet = Fleet()
    message = fleet.opening().message
    for place, changed in changed_bytes(message):
        expected = ["bad-version", "bad-type"][place] if place < 2 else "bad-admission"
        if 10 <= place < 26:
            expected = "old-incarnation"
        assert reason_of(fleet.grant, changed) == expected
    assert reason_of(fleet.grant, message[:49]) == "truncated"
    assert reason_of(fleet.grant, message + bytes(4096)) == "too-large"
    assert fleet.counting.unseals == 0
    assert len(fleet.table) == 0
    fleet.grant(message)
    assert fleet.counting.unseals == 1


def tagged(fleet: Fleet, head: bytes, sealed: bytes, credential: DeviceCredential) -> bytes:
    tag = admission_tag(credential.admission_key, AdmissionPurpose.SESSION_OPEN, head + sealed)
    return head + tag + sealed


def test_an_open_with_a_right_tag_but_a_wrong_inside_is_refused() -> None:
    fleet = Fleet()
    anna, freshness = fleet.anna, Freshness(INCARNATION, 1)
    info = open_info(fleet.descriptor, freshness)
    head = prefix(MessageType.SESSION_OPEN) + (1).to_bytes(8, "little") + freshness.to_bytes()
    to = hpke.public_key(fleet.descriptor.hpke)
    good = encode(OpenRequest(anna.device_id, fleet.descriptor.hpke, bytes(32)))
    signed = signature.sign(anna.identity, signature.Purpose.SESSION_OPEN, info + good)

    def attempt(inside: bytes, info: bytes = info) -> str:
        return reason_of(fleet.grant, tagged(fleet, head, hpke.seal(to, info, inside), anna))

    flipped = bytes([signed[0] ^ 1]) + signed[1:]
    other = encode(OpenRequest(b"x" * 16, fleet.descriptor.hpke, bytes(32)))
    unusable = encode(OpenRequest(anna.device_id, b"\xff" * 1216, bytes(32)))
    unusable_signed = signature.sign(anna.identity, signature.Purpose.SESSION_OPEN, info + unusable)
    assert attempt(flipped + good) == "bad-signature"
    assert attempt(signed + other) == "wrong-device"
    assert attempt(signed + good + b"\x00") == "bad-cbor"
    assert attempt(signed + b"\xa0") == "wrong-fields"
    assert attempt(signed[:40]) == "truncated"
    assert attempt(signed + good, b"tessera/1 open" + bytes(32)) == "cannot-unseal"
    assert attempt(unusable_signed + unusable) == "bad-key"
    assert reason_of(fleet.grant, tagged(fleet, head, b"", anna)) == "cannot-unseal"
    for moved in (Freshness(INCARNATION, 2), Freshness(bytes(16), 1)):
        assert attempt(signed + good, open_info(fleet.descriptor, moved)) == "cannot-unseal"
    later = prefix(MessageType.SESSION_OPEN) + (9).to_bytes(8, "little") + freshness.to_bytes()
    assert reason_of(fleet.grant, tagged(fleet, later, b"", anna)) == "unknown-descriptor"
    assert len(fleet.table) == 0
    # The tag alone proves nothing: another device's identity under anna's admission key.
    thief = DeviceCredential(anna.device_id, key_from("thief"), anna.admission_key)
    assert reason_of(fleet.grant, fleet.opening("t", thief).message) == "bad-signature"


def test_every_changed_byte_of_a_reply_is_refused_and_the_right_one_still_counts() -> None:
    fleet = Fleet()
    attempt = fleet.opening()
    reply = fleet.grant(attempt.message)
    for place, changed in itertools.islice(changed_bytes(reply), 0, None, 7):
        expected = ["bad-version", "bad-type"][place] if place < 2 else "cannot-unseal"
        assert reason_of(attempt.accept, changed, NOW) == expected
    assert reason_of(attempt.accept, reply[:1], NOW) == "truncated"
    assert reason_of(attempt.accept, reply + bytes(4096), NOW) == "too-large"
    foreign = fleet.grant(fleet.opening("2").message)
    assert reason_of(attempt.accept, foreign, NOW) == "cannot-unseal"
    session = attempt.accept(reply, NOW).session
    assert reason_of(attempt.accept, reply, NOW) == "already-answered"
    fleet.table.receive(session.seal(16, b"x"), fleet.anna.device_id)


def test_a_reply_must_be_signed_by_the_descriptors_key_over_this_open() -> None:
    fleet = Fleet()
    attempt = fleet.opening()
    # The device's ephemeral key is drawn first: whoever can unseal the open knows it too.
    seed = SeededBytes("open 1")(hpke.SEED_BYTES)
    ephemeral = hpke.public_bytes(seed)
    digest = hashlib.sha256(attempt.message).digest()
    reply = SessionReply(b"12345678", bytes(32), INCARNATION, NOW, ())
    for other in (key_from("mallory"), fleet.serving.signing):
        forged = encode_reply(reply, digest, ephemeral, other)
        assert reason_of(attempt.accept, forged, NOW) == "bad-signature"
    key = fleet.serving.sessions
    body = encode(reply)
    for_another = signature.sign(key, signature.Purpose.SESSION_REPLY, bytes(32) + body)
    to = hpke.public_key(ephemeral)
    sealed = hpke.seal(to, reply_info(digest), for_another + body)
    moved = prefix(MessageType.SESSION_REPLY) + sealed
    assert reason_of(attempt.accept, moved, NOW) == "bad-signature"
    genuine = encode_reply(reply, digest, ephemeral, key)
    assert attempt.accept(genuine, NOW).session.session_id == b"12345678"


@pytest.mark.parametrize("where", ["reply", "store"])
def test_the_descriptors_expiry_is_judged_by_the_reply_and_the_largest_time_seen(
    where: str,
) -> None:
    fleet = Fleet()
    attempt = fleet.opening()
    fleet.unix_clock.seconds = float(EXPIRES if where == "reply" else NOW)
    reply = fleet.grant(attempt.message)
    largest = EXPIRES if where == "store" else 0
    assert reason_of(attempt.accept, reply, largest) == "descriptor-expired"
    assert reason_of(attempt.accept, reply, 0) == "already-answered"


def test_an_open_is_bound_to_every_byte_of_its_descriptor() -> None:
    """Two descriptors with one serial and the same keys: no open serves for both."""
    fleet = Fleet()
    twin = make_descriptor(
        key_from("delegate"),
        fleet.descriptor.delegation,
        1,
        NOW,
        EXPIRES + 1,
        fleet.descriptor.signing,
        fleet.descriptor.sessions,
        fleet.descriptor.hpke,
    )
    message = SessionOpening(fleet.anna, twin, fleet.fresh(), fleet.clock).message
    assert reason_of(fleet.grant, message) == "cannot-unseal"


def test_a_session_s_time_is_the_aggregator_s_whatever_was_signed_before() -> None:
    fleet = Fleet()
    attempt = fleet.opening()
    opened = attempt.accept(fleet.grant(attempt.message), NOW + 100)
    assert opened.time_unix_seconds == NOW


def test_the_key_schedule_depends_on_all_of_its_inputs() -> None:
    base = (bytes(32), bytes(32), b"open", b"reply")
    changed = [(b"\x01" + bytes(31), bytes(32), b"open", b"reply")]
    changed += [(bytes(32), b"\x01" + bytes(31), b"open", b"reply")]
    changed += [(bytes(32), bytes(32), b"opeN", b"reply")]
    changed += [(bytes(32), bytes(32), b"open", b"replY")]
    all_keys = [derive_session_keys(*inputs) for inputs in [base, *changed]]
    material = [(k.key, k.iv) for keys in all_keys for k in (keys.up, keys.down)]
    assert len({key for key, _ in material}) == len({iv for _, iv in material}) == 10
    with pytest.raises(ValueError, match="32 bytes"):
        derive_session_keys(b"", bytes(32), b"", b"")


def test_nonces_are_unique_over_both_directions() -> None:
    fleet = Fleet()
    keys = [derive_session_keys(bytes(32), bytes(32), b"open", bytes([i])) for i in range(3)]
    used = set()
    for session_keys, direction in itertools.product(keys, Direction):
        of = session_keys.of(direction)
        cipher = EnvelopeCipher(of, direction)
        used |= {(of.key, cipher.nonce(n)) for n in [*range(2000), MAX_MESSAGES - 1]}
    assert len(used) == 6 * 2001
    # And a session really counts: no two envelopes of either end share a sequence number.
    opened = fleet.open()
    fleet.table.receive(opened.session.seal(16, b""), fleet.anna.device_id)
    ups = {opened.session.seal(16, b"same")[12:20] for _ in range(300)}
    downs = {fleet.table.seal(fleet.anna.device_id, 17, b"same")[12:20] for _ in range(300)}
    assert len(ups) == len(downs) == 300


def test_a_failed_seal_does_not_give_its_number_to_the_next() -> None:
    device, _, _ = pair()
    with pytest.raises(ValueError, match="16 to 255"):
        device.seal(3, b"")
    assert device.seal(16, b"")[12:20] == (1).to_bytes(8, "little")


def test_both_ends_stop_after_24_hours() -> None:
    device, aggregator, clock = pair()
    late = device.seal(16, b"x")
    clock.seconds = MAX_LIFETIME_SECONDS - 1
    aggregator.open(device.seal(16, b"y"))
    assert not device.is_spent()
    clock.seconds = MAX_LIFETIME_SECONDS
    assert device.is_spent()
    assert aggregator.is_spent()
    assert reason_of(device.seal, 16, b"") == "session-expired"
    assert reason_of(aggregator.seal, 16, b"") == "session-expired"
    assert reason_of(aggregator.open, late) == "session-expired"


def test_both_ends_stop_after_2_to_the_20_messages() -> None:
    device, aggregator, _ = pair()
    device._next_sequence = MAX_MESSAGES - 1  # a million real seals would take the suite's time
    last = device.seal(16, b"last")
    assert aggregator.open(last).sequence == MAX_MESSAGES - 1
    assert device.is_spent()
    assert reason_of(device.seal, 16, b"") == "session-exhausted"
    keys = derive_session_keys(bytes(32), bytes(32), b"open", b"reply")
    cipher = EnvelopeCipher(keys.up, Direction.UP)
    beyond = cipher.seal(16, b"session!", MAX_MESSAGES, b"")
    assert reason_of(aggregator.open, beyond) == "session-exhausted"


def test_replays_reflections_and_strangers_are_refused() -> None:
    fleet = Fleet()
    bert = make_credential("bert")
    anna_session, bert_session = fleet.open().session, fleet.open("b", bert).session
    message = anna_session.seal(16, b"x")
    assert reason_of(fleet.table.receive, message, bert.device_id) == "wrong-topic"
    fleet.table.receive(message, fleet.anna.device_id)
    assert reason_of(fleet.table.receive, message, fleet.anna.device_id) == "replayed"
    assert reason_of(anna_session.open, message) == "bad-tag"  # its own envelope, reflected
    fleet.table.receive(bert_session.seal(16, b"x"), bert.device_id)
    for_bert = fleet.table.seal(bert.device_id, 17, b"x")
    assert reason_of(anna_session.open, for_bert) == "wrong-session"
    nowhere = message[:4] + bytes(8) + message[12:]
    assert reason_of(fleet.table.receive, nowhere, fleet.anna.device_id) == "unknown-session"
    assert reason_of(fleet.table.seal, b"?" * 16, 17, b"") == "no-session"


def test_a_forged_sequence_number_moves_no_window() -> None:
    device, aggregator, _ = pair()
    first, second = device.seal(16, b"1"), device.seal(16, b"2")
    forged = bytearray(second)
    forged[12:20] = (MAX_MESSAGES - 1).to_bytes(8, "little")
    assert reason_of(aggregator.open, bytes(forged)) == "bad-tag"
    assert aggregator.open(first).payload == b"1"
    assert aggregator.open(second).payload == b"2"


def test_the_same_open_again_gets_the_same_reply_without_work() -> None:
    fleet = Fleet(burst=1.0)
    attempt = fleet.opening()
    reply = fleet.grant(attempt.message)
    assert [fleet.grant(attempt.message) for _ in range(3)] == [reply] * 3
    assert (fleet.counting.unseals, fleet.counting.seals) == (1, 1)
    session = attempt.accept(reply, NOW).session
    fleet.table.receive(session.seal(16, b""), fleet.anna.device_id)
    assert reason_of(fleet.grant, attempt.message) == "replayed"
    assert reason_of(fleet.grant, fleet.opening("2").message) == "too-many"
    assert fleet.counting.unseals == 1
    fleet.clock.seconds += 1
    fleet.grant(fleet.opening("2").message)


def test_what_follows_a_reply_is_sealed_under_the_session_that_it_opens() -> None:
    fleet = Fleet()
    anna = fleet.anna.device_id
    assert reason_of(fleet.table.seal_newest, anna, 19, b"") == "no-session"
    attempt = fleet.opening()
    reply = fleet.grant(attempt.message)
    assert reason_of(fleet.table.seal, anna, 19, b"") == "no-session"
    follows = fleet.table.seal_newest(anna, 19, b"first")
    session = attempt.accept(reply, NOW).session
    assert session.open(follows).payload == b"first"
    assert reason_of(session.open, follows) == "replayed"
    # The device's first envelope makes it the live one, which goes on counting.
    fleet.table.receive(session.seal(16, b""), anna)
    for seal in (fleet.table.seal, fleet.table.seal_newest):
        assert session.open(seal(anna, 17, b"next")).payload == b"next"
    # With another open granted, the live one stays in use for what is not about the reply.
    fleet.grant(fleet.opening("2").message)
    assert session.open(fleet.table.seal(anna, 17, b"last")).payload == b"last"
    assert reason_of(session.open, fleet.table.seal_newest(anna, 19, b"")) == "wrong-session"


def test_an_open_is_answered_again_a_few_times_only() -> None:
    fleet = Fleet()
    message = fleet.opening().message
    assert len({fleet.grant(message) for _ in range(1 + MOST_REPEATS)}) == 1
    assert reason_of(fleet.grant, message) == "replayed"
    # An older one not at all: its device has given it up.
    newer = fleet.opening("2").message
    fleet.grant(newer)
    assert reason_of(fleet.grant, message) == "replayed"
    fleet.clock.seconds = PENDING_SECONDS
    assert reason_of(fleet.grant, newer) == "replayed"
    assert fleet.counting.unseals == 2


def test_replayed_opens_are_refused_for_ever_at_no_cost_but_the_tag() -> None:
    fleet = Fleet(burst=1000.0)
    live = fleet.open("live").session
    fleet.table.receive(live.seal(16, b""), fleet.anna.device_id)
    recorded = [fleet.opening(f"old {i}").message for i in range(200)]
    for message in recorded:
        fleet.grant(message)
    unsealed, taken = fleet.counting.unseals, len(fleet.table)
    assert taken == 1 + MOST_PENDING
    fleet.clock.seconds = PENDING_SECONDS
    fleet.table.sweep()
    for message in recorded * 2:
        assert reason_of(fleet.grant, message) == "replayed"
    assert fleet.counting.unseals == unsealed and len(fleet.table) == 2  # the live and the newest
    fleet.table.receive(live.seal(16, b""), fleet.anna.device_id)
    live.open(fleet.table.seal(fleet.anna.device_id, 17, b""))


def test_opens_of_another_life_are_refused_before_the_tag() -> None:
    fleet = Fleet()
    message = fleet.opening(freshness=Freshness(bytes(16), 7)).message
    assert reason_of(fleet.grant, message) == "old-incarnation"
    assert reason_of(fleet.grant, message[:-1]) == "old-incarnation"
    assert fleet.counting.unseals == len(fleet.table) == len(fleet.table._marks) == 0


def test_an_open_that_finds_no_time_charges_nobody_and_may_come_again() -> None:
    fleet = Fleet(burst=1.0)
    fleet.table._budget = WorkBudget(0.5, fleet.clock)
    for _ in range(2):
        with fleet.table._budget.work():
            fleet.clock.seconds += 1.95  # somebody else's work took so long
    message = fleet.opening().message
    for _ in range(5):
        assert reason_of(fleet.grant, message) == "busy"
    assert fleet.counting.unseals == 0
    fleet.clock.seconds += 5.0
    fleet.grant(message)


def test_who_has_the_admission_key_alone_raises_no_mark() -> None:
    fleet = Fleet()
    thief = DeviceCredential(fleet.anna.device_id, key_from("thief"), fleet.anna.admission_key)
    high = fleet.opening("t", thief, Freshness(INCARNATION, 2**64 - 1)).message
    assert reason_of(fleet.grant, high) == "bad-signature"
    fleet.open()


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 2**64 - 1))))
def test_a_mark_never_falls_and_counts_for_its_sender_alone(asked: list[tuple[bytes, int]]) -> None:
    marks, highest = FreshnessMarks(INCARNATION), {b"a": 0, b"b": 0}
    for sender, counter in asked:
        freshness = Freshness(INCARNATION, counter)
        assert Freshness.from_bytes(b"." + freshness.to_bytes(), 1) == freshness
        assert marks.is_new(sender, freshness) == (counter > highest[sender])
        if marks.is_new(sender, freshness):
            marks.raise_to(sender, freshness)
            highest[sender] = counter
    assert len(marks) <= 2
    marks.forget(b"a")
    assert marks.is_new(b"a", Freshness(INCARNATION, 1))


def test_values_out_of_range_have_no_freshness() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Freshness(b"", 1)
    for counter in (-1, 2**64):
        with pytest.raises(ValueError, match="counter"):
            Freshness(INCARNATION, counter)


def test_sessions_that_nobody_used_or_that_ended_are_forgotten() -> None:
    fleet = Fleet()
    first, waiting, newest = (fleet.open(name).session for name in "123")
    fleet.table.receive(first.seal(16, b""), fleet.anna.device_id)
    fleet.clock.seconds = PENDING_SECONDS
    fleet.table.sweep()
    assert reason_of(fleet.table.receive, waiting.seal(16, b""), fleet.anna.device_id) == (
        "unknown-session"
    )
    assert fleet.table.has_session(fleet.anna.device_id)
    # The newest is the one that the device would listen under, whether it says anything or not.
    follows = fleet.table.seal_newest(fleet.anna.device_id, 19, b"told")
    assert newest.open(follows).payload == b"told"
    fleet.clock.seconds = MAX_LIFETIME_SECONDS
    assert not fleet.table.has_session(fleet.anna.device_id)
    fleet.table.sweep()
    assert len(fleet.table) == 0


def test_revocation_ends_every_session_of_one_device_at_once() -> None:
    fleet = Fleet()
    bert = make_credential("bert")
    live, waiting = fleet.open("1").session, fleet.open("2").session
    bert_session = fleet.open("b", bert).session
    fleet.table.receive(live.seal(16, b""), fleet.anna.device_id)
    fleet.table.end(fleet.anna.device_id)
    fleet.table.end(fleet.anna.device_id)
    for session in (live, waiting):
        message = session.seal(16, b"")
        assert reason_of(fleet.table.receive, message, fleet.anna.device_id) == "unknown-session"
    fleet.table.receive(bert_session.seal(16, b""), bert.device_id)


def test_after_a_rotation_the_old_descriptor_serves_for_its_grace_period() -> None:
    fleet = Fleet()
    attempt = fleet.opening()
    old = make_serving(1, until=NOW + 5)
    fleet.table.replace_keyring(Keyring([old, make_serving(2)]))
    opened = attempt.accept(fleet.grant(attempt.message), NOW)
    fleet.table.receive(opened.session.seal(16, b""), fleet.anna.device_id)
    fleet.unix_clock.seconds = NOW + 5.0
    assert reason_of(fleet.grant, fleet.opening("2").message) == "retired-descriptor"


def test_a_device_receives_under_the_old_session_until_the_new_one_is_answered() -> None:
    fleet = Fleet()
    device, anna = DeviceSessions(), fleet.anna.device_id
    assert device.needs_session()
    assert reason_of(device.seal, 16, b"") == "no-session"
    device.install(fleet.open("1").session)
    fleet.table.receive(device.seal(16, b""), anna)
    device.receive(fleet.table.seal(anna, 17, b"1"))
    device.install(fleet.open("2").session)
    assert device.receive(fleet.table.seal(anna, 17, b"old")).payload == b"old"
    old_style = fleet.table.seal(anna, 17, b"late")
    fleet.table.receive(device.seal(16, b"under the new"), anna)
    assert device.receive(fleet.table.seal(anna, 17, b"new")).payload == b"new"
    assert reason_of(device.receive, old_style) == "unknown-session"
    device.close()
    assert device.needs_session()


def test_parts_of_a_whole_go_both_ways_under_the_newest_session() -> None:
    fleet = Fleet()
    device, anna = DeviceSessions(), fleet.anna.device_id
    device.install(fleet.open().session)
    fragment = Fragment(b"message!", 1, 3, 200_000)
    assert fleet.table.receive(device.seal(16, b"up", fragment), anna).fragment == fragment
    assert device.receive(fleet.table.seal(anna, 17, b"down", fragment)).fragment == fragment


@pytest.mark.parametrize("sessions", [1, 2, 3])
def test_a_device_needs_a_session_when_its_newest_one_is_spent(sessions: int) -> None:
    fleet, device = Fleet(), DeviceSessions()
    for number in range(sessions):
        fleet.clock.seconds = 1000.0 * number
        device.install(fleet.open(str(number)).session)
    newest_ends = fleet.clock.seconds + MAX_LIFETIME_SECONDS
    fleet.clock.seconds = newest_ends - 1.0
    assert not device.needs_session()
    fleet.clock.seconds = newest_ends
    assert device.needs_session()


def test_a_session_that_was_replaced_is_known_no_more() -> None:
    fleet = Fleet()
    anna = fleet.anna.device_id
    sessions = [fleet.open(str(number)).session for number in range(3)]
    for session in (sessions[0], sessions[2]):
        fleet.table.receive(session.seal(16, b""), anna)
    assert len(fleet.table) == 1
    for gone in sessions[:2]:
        assert reason_of(fleet.table.receive, gone.seal(16, b""), anna) == "unknown-session"
    fleet.table.receive(sessions[2].seal(16, b""), anna)


def test_of_too_many_that_wait_the_oldest_is_given_up() -> None:
    fleet = Fleet()
    anna = fleet.anna.device_id
    sessions = [fleet.open(str(number)).session for number in range(MOST_PENDING + 1)]
    assert len(fleet.table) == MOST_PENDING
    assert reason_of(fleet.table.receive, sessions[0].seal(16, b""), anna) == "unknown-session"
    for session in sessions[1:]:
        fleet.table.receive(session.seal(16, b""), anna)


def test_one_device_s_opens_use_up_nothing_of_another_s() -> None:
    fleet = Fleet(burst=1.0)
    fleet.open()
    assert reason_of(fleet.grant, fleet.opening("2").message) == "too-many"
    fleet.open("b", make_credential("bert"))


def test_a_device_whose_session_ended_is_as_if_it_had_never_had_one() -> None:
    fleet = Fleet()
    anna = fleet.anna.device_id
    ended = fleet.open("1").session
    fleet.table.receive(ended.seal(16, b""), anna)
    fleet.clock.seconds = MAX_LIFETIME_SECONDS - 1.0
    waiting = fleet.open("2").session
    fleet.clock.seconds = MAX_LIFETIME_SECONDS
    fleet.table.sweep()
    assert len(fleet.table) == 1 and not fleet.table.has_session(anna)
    assert reason_of(fleet.table.seal, anna, 17, b"") == "no-session"
    fleet.table.receive(waiting.seal(16, b""), anna)
    assert fleet.table.has_session(anna)


def test_a_reply_is_unsealed_by_what_it_is_given_and_its_time_has_63_bits() -> None:
    fleet = Fleet()
    attempt = fleet.opening()
    digest = hashlib.sha256(attempt.message).digest()
    ephemeral = hpke.public_bytes(SeededBytes("open 1")(hpke.SEED_BYTES))
    reply = SessionReply(b"12345678", bytes(32), INCARNATION, 2**63 - 1, ())
    message = encode_reply(reply, digest, ephemeral, fleet.serving.sessions)
    unseal = fleet.counting.unseal
    assert reason_of(attempt.accept, message, NOW, unseal) == "descriptor-expired"
    assert fleet.counting.unseals == 1
    assert reason_of(fleet.opening("2").accept, message[:2], NOW) == "cannot-unseal"


def test_credentials_do_not_print_themselves_and_are_checked() -> None:
    anna = make_credential("anna")
    assert anna.admission_key.hex() not in repr(anna)
    for device_id, key in [(b"", bytes(32)), (bytes(16), b"")]:
        with pytest.raises(ValueError, match="bytes"):
            DeviceCredential(device_id, anna.identity, key)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=400), st.data())
def test_random_insides_never_escape_as_another_error(inside: bytes, data: st.DataObject) -> None:
    """Whatever an insider seals, signs and tags: only WireError comes out, at either end."""
    fleet, anna, freshness = FUZZED, FUZZED.anna, FUZZED.fresh()
    info = open_info(fleet.descriptor, freshness)
    body = encode(OpenRequest(anna.device_id, fleet.descriptor.hpke, bytes(32)))
    head = prefix(MessageType.SESSION_OPEN) + (1).to_bytes(8, "little") + freshness.to_bytes()
    for content in (inside, mutated(body, data)):
        signed = signature.sign(anna.identity, signature.Purpose.SESSION_OPEN, info + content)
        sealed = hpke.seal(hpke.public_key(fleet.descriptor.hpke), info, signed + content)
        try:
            fleet.grant(tagged(fleet, head, sealed, anna))
        except WireError:
            continue
    attempt = fleet.opening()
    digest = hashlib.sha256(attempt.message).digest()
    ephemeral = hpke.public_bytes(SeededBytes("open 1")(hpke.SEED_BYTES))
    signed = signature.sign(
        fleet.serving.sessions,
        signature.Purpose.SESSION_REPLY,
        digest + inside,
    )
    sealed = hpke.seal(hpke.public_key(ephemeral), reply_info(digest), signed + inside)
    assert reason_of(attempt.accept, prefix(MessageType.SESSION_REPLY) + sealed, NOW) in (
        "bad-cbor",
        "wrong-fields",
        "bad-field",
    )
    for message in (inside, prefix(MessageType.SESSION_OPEN) + inside):
        with pytest.raises(WireError):
            fleet.grant(message)
        with pytest.raises(WireError):
            attempt.accept(message, NOW)
        with pytest.raises(WireError):
            fleet.table.receive(message, anna.device_id)


FUZZED = Fleet(burst=1e9)


class ReplaceMachine(RuleBasedStateMachine):
    """The replace rule against a model: which sessions each end would still take."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(burst=1e9)
        self.opened: list[OpenedSession] = []
        self.live: int | None = None
        self.waiting: list[int] = []
        self.gone: set[int] = set()
        self.opens: list[tuple[int, bytes]] = []
        self.repeats: dict[int, int] = {}
        self.highest = 0
        self.used: list[bytes] = []

    @property
    def anna(self) -> bytes:
        return self.fleet.anna.device_id

    def sort_out(self) -> None:
        while len(self.waiting) > MOST_PENDING:
            self.gone.add(self.waiting.pop(0))

    @precondition(lambda self: len(self.opened) < 12)
    @rule()
    def open(self) -> None:
        number = len(self.opened)
        attempt = self.fleet.opening(str(number))
        self.highest = self.fleet.counter
        self.opens.append((number, attempt.message))
        self.opened.append(attempt.accept(self.fleet.grant(attempt.message), NOW))
        self.waiting.append(number)
        self.sort_out()

    @precondition(lambda self: self.opens)
    @rule(pick=st.integers(0, 99))
    def replay_an_open(self, pick: int) -> None:
        number, message = self.opens[pick % len(self.opens)]
        times = self.repeats.get(number, 0)
        unsealed = self.fleet.counting.unseals
        if self.waiting and number == self.waiting[-1] and times < MOST_REPEATS:
            self.fleet.grant(message)
            self.repeats[number] = times + 1
        else:
            assert reason_of(self.fleet.grant, message) == "replayed"
        assert self.fleet.counting.unseals == unsealed

    @rule(behind=st.integers(0, 99))
    def open_with_a_counter_that_fell(self, behind: int) -> None:
        freshness = Freshness(INCARNATION, max(0, self.highest - behind))
        message = self.fleet.opening("fallen", freshness=freshness).message
        assert reason_of(self.fleet.grant, message) == "replayed"

    @rule(ahead=st.integers(1, 2**32))
    def skip_counters(self, ahead: int) -> None:
        self.fleet.counter += ahead

    @rule()
    def sweep(self) -> None:
        self.fleet.table.sweep()

    @rule(counter=st.integers(0, 2**64 - 1))
    def ask_another_life(self, counter: int) -> None:
        message = self.fleet.opening("other", freshness=Freshness(bytes(16), counter)).message
        assert reason_of(self.fleet.grant, message) == "old-incarnation"

    @precondition(lambda self: self.opened)
    @rule(pick=st.integers(0, 99))
    def send(self, pick: int) -> None:
        number = pick % len(self.opened)
        message = self.opened[number].session.seal(16, bytes([number]))
        if number in self.gone:
            assert reason_of(self.fleet.table.receive, message, self.anna) == "unknown-session"
            return
        assert self.fleet.table.receive(message, self.anna).payload == bytes([number])
        self.used.append(message)
        if number in self.waiting:
            place = self.waiting.index(number)
            self.gone |= set(self.waiting[:place])
            if self.live is not None:
                self.gone.add(self.live)
            self.live = number
            del self.waiting[: place + 1]

    @precondition(lambda self: self.used)
    @rule(pick=st.integers(0, 99))
    def replay_an_envelope(self, pick: int) -> None:
        message = self.used[pick % len(self.used)]
        assert reason_of(self.fleet.table.receive, message, self.anna) in (
            "replayed",
            "unknown-session",
        )

    @precondition(lambda self: self.opened)
    @rule(pick=st.integers(0, 99))
    def forge(self, pick: int) -> None:
        session = self.opened[pick % len(self.opened)].session
        message = bytearray(session.seal(16, b""))
        message[-1] ^= 1
        assert reason_of(self.fleet.table.receive, bytes(message), self.anna) in (
            "bad-tag",
            "unknown-session",
        )

    @rule()
    def revoke(self) -> None:
        self.fleet.table.end(self.anna)
        assert len(self.fleet.table._marks) == 0
        self.gone |= set(range(len(self.opened)))
        self.live, self.waiting, self.highest = None, [], 0
        self.opens.clear()  # the table forgot them too; a revoked device's opens are not asked for

    @invariant()
    def answers_go_out_under_the_live_session(self) -> None:
        assert len(self.fleet.table) == len(self.waiting) + (self.live is not None)
        if self.live is None:
            assert reason_of(self.fleet.table.seal, self.anna, 17, b"") == "no-session"
        else:
            self.opened[self.live].session.open(self.fleet.table.seal(self.anna, 17, b""))


ReplaceMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestReplaceRule = ReplaceMachine.TestCase
