from __future__ import annotations

import base64
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, decode_value, prefix
from device_sdk.wire.seal import hpke, signature
from device_sdk.wire.seal.admission import (
    AdmissionPurpose,
    TokenBuckets,
    WorkBudget,
    admission_tag,
)
from device_sdk.wire.seal.enrolment import (
    CodeUse,
    EnrolmentAttempt,
    EnrolmentDesk,
    EnrolmentOutcome,
    Token,
)
from device_sdk.wire.seal.enrolment_message import (
    EnrolAnswer,
    EnrolmentCode,
    EnrolRefusal,
    EnrolRequest,
    Grant,
    encode_answer,
    enrol_info,
    new_code,
    parse_code,
    read_request_head,
    requester_of,
)
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.keyring import Keyring
from device_sdk.wire.seal.signature import Purpose
from tests.fakes.parties import (
    EXPIRES,
    INCARNATION,
    NOW,
    Clock,
    CountingHpke,
    SeededBytes,
    key_from,
    make_serving,
)
from tests.fakes.refusals import changed_bytes, reason_of

SERVING = make_serving()
DESCRIPTOR = SERVING.descriptor
CODE = new_code(DESCRIPTOR.root_fingerprint, 1, NOW - 60, SeededBytes("code"))
TOKEN = Token(CODE.token_id, CODE.secret, NOW + 3600)


def attempt_of(
    name: str,
    again: str = "",
    code: EnrolmentCode = CODE,
    *,
    counter: int = 1,
    incarnation: bytes = INCARNATION,
) -> EnrolmentAttempt:
    return EnrolmentAttempt(
        code,
        DESCRIPTOR,
        key_from(name),
        Freshness(incarnation, counter),
        random_bytes=SeededBytes(f"attempt {name} {again}"),
    )


class Office:
    """A desk and the store's one row."""

    def __init__(self, burst: float = 1000.0, share: float = 1.0) -> None:
        self.unix_clock = Clock(float(NOW))
        self.clock = Clock()
        self.counting = CountingHpke()
        self.token = TOKEN
        self.desk = EnrolmentDesk(
            Keyring([SERVING]),
            INCARNATION,
            TokenBuckets(burst, 1.0, self.clock),
            WorkBudget(share, self.clock),
            self.unix_clock,
            random_bytes=SeededBytes("desk"),
            unseal=self.counting.unseal,
        )

    def answer(self, message: bytes) -> EnrolmentOutcome:
        outcome = self.desk.answer(message, self.token)
        self.token = outcome.token
        return outcome


def test_a_code_as_text_round_trips_as_people_type_it() -> None:
    text = CODE.to_text()
    assert len(text) == 88 + 10
    assert parse_code(text) == CODE
    typed = text.lower().replace("-", " ").replace("o", "0").replace("i", "1").replace("b", "8")
    assert parse_code(f"  {typed}\n") == CODE
    assert CODE.secret.hex() not in repr(CODE)


def test_every_wrong_character_of_a_code_is_noticed() -> None:
    text = CODE.to_text().replace("-", "")
    for place, letter in enumerate(text):
        wrong = text[:place] + ("A" if letter != "A" else "Q") + text[place + 1 :]
        assert reason_of(parse_code, wrong) == "bad-code"
        swapped = text[:place] + text[place + 1 : place + 2] + letter + text[place + 2 :]
        if swapped != text:
            assert reason_of(parse_code, swapped) == "bad-code"


@given(st.text(max_size=100) | st.text("ABCD234567-", min_size=70, max_size=100))
def test_other_texts_are_no_codes(text: str) -> None:
    assert reason_of(parse_code, text) == "bad-code"


def test_letters_outside_ascii_are_no_code() -> None:
    assert reason_of(parse_code, "É" * 88) == "bad-code"
    assert reason_of(parse_code, base64.b32encode(bytes(55)).decode()) == "bad-code"


@given(st.integers(0, 2**40 - 1), st.integers(0, 2**40 - 1))
def test_every_serial_and_time_round_trips(serial: int, made: int) -> None:
    code = new_code(bytes(16), serial, made, SeededBytes("any"))
    assert parse_code(code.to_text()) == code


def test_codes_out_of_range_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="a byte string of 16 bytes"):
        EnrolmentCode(b"", b"", b"", 0, 0)
    for serial, made, what in [(-1, 0, "serial"), (2**40, 0, "serial"), (0, 2**40, "unix_seconds")]:
        with pytest.raises(ValueError, match=what):
            new_code(bytes(16), serial, made)


def test_the_first_key_binds_the_code_and_gets_the_same_answer_again() -> None:
    office = Office()
    first = attempt_of("anna")
    outcome = office.answer(first.message)
    assert outcome.joined
    assert outcome.refusal is None
    assert outcome.mailbox == first.mailbox
    enrolled = first.accept(outcome.answer)
    grant = enrolled.grant
    assert enrolled.time_unix_seconds == NOW
    identity = key_from("anna").public_key().public_bytes_raw()
    assert outcome.token.binding == CodeUse(identity, grant)

    assert reason_of(office.answer, first.message) == "replayed"  # the broker delivers twice
    again = attempt_of("anna", "after a lost answer", counter=2)
    repeated = office.answer(again.message)
    assert not repeated.joined
    assert again.accept(repeated.answer) == enrolled
    office.unix_clock.seconds = NOW + 7200.0  # the code's expiry no longer matters to its holder
    again = attempt_of("anna", "after a crash", counter=3)
    assert again.accept(office.answer(again.message).answer).grant == grant


def test_a_request_is_answered_once_and_in_one_life_at_no_further_cost() -> None:
    office = Office(burst=2.0)
    recorded = [attempt_of("anna", str(n), counter=n).message for n in (1, 2)]
    for message in recorded:
        office.answer(message)
    for message in recorded * 50:
        assert reason_of(office.answer, message) == "replayed"
    other_life = attempt_of("anna", "3", counter=3, incarnation=bytes(16)).message
    for message in (other_life, other_life[:-1] + b"?"):  # judged before the tag
        assert reason_of(office.answer, message) == "old-incarnation"
        assert reason_of(office.desk.read_head, message) == "old-incarnation"
    assert office.counting.unseals == 2


def test_the_owner_of_a_code_and_all_others_are_held_against_marks_of_their_own() -> None:
    office = Office()
    office.answer(attempt_of("anna", counter=10).message)
    # The owner's counter hides no stranger, and a stranger's locks no owner out.
    top = 2**64 - 1
    thief = attempt_of("thief", counter=1)
    assert office.answer(thief.message).refusal is EnrolRefusal.CODE_USED
    assert office.answer(attempt_of("thief", "2", counter=top).message).refusal is not None
    assert reason_of(office.answer, attempt_of("bert", counter=top).message) == "replayed"
    assert reason_of(office.answer, attempt_of("anna", "2", counter=10).message) == "replayed"
    assert office.answer(attempt_of("anna", "3", counter=11).message).refusal is None
    # Marks do not grow with the identities that try a code.
    assert len(office.desk._marks) == 2


def test_a_request_that_finds_no_time_costs_nothing_and_may_come_again() -> None:
    office = Office(burst=1.0, share=0.5)
    for _ in range(2):
        with office.desk._budget.work():
            office.clock.seconds += 1.95  # somebody else's work took so long
    message = attempt_of("anna").message
    for _ in range(3):
        assert reason_of(office.answer, message) == "busy"
    assert office.counting.unseals == 0
    office.clock.seconds += 5.0
    assert office.answer(message).joined


def test_another_key_is_refused_and_shown() -> None:
    office = Office()
    office.answer(attempt_of("anna").message)
    bound = office.token
    thief = attempt_of("thief")
    outcome = office.answer(thief.message)
    assert outcome.refusal is EnrolRefusal.CODE_USED
    assert outcome.identity == key_from("thief").public_key().public_bytes_raw()
    assert outcome.token is bound
    assert not outcome.joined
    assert reason_of(thief.accept, outcome.answer) == "code-used"


def test_an_expired_code_and_a_revoked_key_are_refused() -> None:
    office = Office()
    office.unix_clock.seconds = NOW + 3600.0
    late = attempt_of("late")
    outcome = office.answer(late.message)
    assert outcome.refusal is EnrolRefusal.CODE_EXPIRED
    assert office.token.binding is None
    assert reason_of(late.accept, outcome.answer) == "code-expired"

    office = Office()
    first = attempt_of("anna")
    grant = first.accept(office.answer(first.message).answer).grant
    identity = key_from("anna").public_key().public_bytes_raw()
    office.token = Token(CODE.token_id, CODE.secret, NOW, CodeUse(identity, grant, revoked=True))
    again = attempt_of("anna", "again", counter=2)
    assert reason_of(again.accept, office.answer(again.message).answer) == "revoked"


def test_every_changed_byte_is_refused_before_public_key_work() -> None:
    office = Office()
    message = attempt_of("anna").message
    for place, changed in changed_bytes(message):
        expected = ["bad-version", "bad-type"][place] if place < 2 else "bad-admission"
        if 10 <= place < 18:
            expected = "wrong-token"
        if 34 <= place < 50:
            expected = "old-incarnation"
        assert reason_of(office.answer, changed) == expected
    wrong_secret = replace(CODE, secret=bytes(16))
    guess = attempt_of("anna", code=wrong_secret)
    assert reason_of(office.answer, guess.message) == "bad-admission"
    assert reason_of(office.answer, message[:73]) == "truncated"
    assert reason_of(office.answer, message + bytes(4096)) == "too-large"
    assert office.counting.unseals == 0
    head = read_request_head(message)
    assert (head.serial, head.token_id) == (DESCRIPTOR.serial, CODE.token_id)
    assert head.freshness == Freshness(INCARNATION, 1)
    office.answer(message)
    assert office.counting.unseals == 1


def test_a_flood_under_one_code_stops_at_its_bucket() -> None:
    office = Office(burst=2.0)
    for counter in (1, 2):
        office.answer(attempt_of("anna", counter=counter).message)
    message = attempt_of("anna", counter=3).message
    assert reason_of(office.answer, message) == "too-many"
    assert office.counting.unseals == 2
    office.clock.seconds = 1.0
    office.answer(message)


def test_one_code_s_requests_use_up_nothing_of_another_s() -> None:
    office = Office(burst=1.0)
    office.answer(attempt_of("anna").message)
    assert reason_of(office.answer, attempt_of("anna", counter=2).message) == "too-many"
    other = new_code(DESCRIPTOR.root_fingerprint, 1, NOW - 60, SeededBytes("other code"))
    office.token = Token(other.token_id, other.secret, NOW + 3600)
    assert office.answer(attempt_of("bert", code=other).message).joined


def test_requests_under_replaced_keys_are_answered_for_their_grace_period() -> None:
    office = Office()
    messages = [attempt_of("anna", counter=counter).message for counter in (1, 2)]
    newer = Keyring([make_serving(1, until=NOW + 10), make_serving(2)])
    office.desk.replace_keyring(newer)
    office.unix_clock.seconds = NOW + 9.0
    assert office.answer(messages[0]).joined
    office.unix_clock.seconds = NOW + 10.0
    assert reason_of(office.answer, messages[1]) == "retired-descriptor"


def tagged(sealed: bytes, serial: int = 1, by: str = "anna") -> bytes:
    head = prefix(MessageType.ENROL_REQUEST) + serial.to_bytes(8, "little") + CODE.token_id
    head += requester_of(key_from(by).public_key().public_bytes_raw())
    head += Freshness(INCARNATION, 1).to_bytes()
    return head + admission_tag(CODE.secret, AdmissionPurpose.ENROL, head + sealed) + sealed


def test_a_right_tag_with_a_wrong_inside_is_refused() -> None:
    office = Office()
    info = enrol_info(DESCRIPTOR, Freshness(INCARNATION, 1))
    key = key_from("anna")
    public = key.public_key().public_bytes_raw()
    request = EnrolRequest(CODE.token_id, public, bytes(16), bytes(32))
    fields: dict[str, cbor.CborValue] = {
        "identity": public,
        "mailbox": bytes(16),
        "proof": request.proven(CODE.secret, info),
        "secret": bytes(32),
        "token": CODE.token_id,
    }

    def attempt(changes: dict[str, cbor.CborValue], extra: bytes = b"", by: str = "anna") -> str:
        body = cbor.encode(fields | changes) + extra
        signed = signature.sign(key_from(by), Purpose.ENROL_REQUEST, info + body)
        sealed = hpke.seal(hpke.public_key(DESCRIPTOR.hpke), info, signed + body)
        return reason_of(office.answer, tagged(sealed))

    assert attempt({"proof": bytes(32)}) == "bad-proof"
    assert attempt({"mailbox": b"\x01" * 16}) == "bad-proof"
    assert attempt({"secret": b"\x01" * 32}) == "bad-proof"
    assert attempt({"token": bytes(8)}) == "wrong-token"
    assert attempt({"proof": b"x"}) == "bad-field"
    assert attempt({"more": 1}) == "wrong-fields"
    assert attempt({}, extra=b"\x00") == "bad-cbor"
    assert attempt({}, by="mallory") == "bad-signature"
    point = b"\x01" + bytes(31)
    nobody = EnrolRequest(CODE.token_id, point, bytes(16), bytes(32))
    proof = nobody.proven(CODE.secret, info)
    assert attempt({"identity": point, "proof": proof}) == "wrong-requester"
    bert = key_from("bert").public_key().public_bytes_raw()
    assert attempt({"identity": bert}, by="bert") == "wrong-requester"
    assert reason_of(office.answer, tagged(b"")) == "cannot-unseal"
    assert reason_of(office.answer, tagged(b"", serial=9)) == "unknown-descriptor"
    assert office.token is TOKEN


def test_every_changed_byte_of_an_answer_is_refused() -> None:
    office = Office()
    attempt = attempt_of("anna")
    answer = office.answer(attempt.message).answer
    for place, changed in changed_bytes(answer):
        expected = ["bad-version", "bad-type"][place] if place < 2 else "bad-tag"
        assert reason_of(attempt.accept, changed) == expected
    assert reason_of(attempt.accept, answer[:13]) == "truncated"
    assert reason_of(attempt.accept, answer + bytes(1024)) == "too-large"
    other = attempt_of("anna", "2")
    assert reason_of(other.accept, answer) == "bad-tag"
    secret = attempt._request.reply_secret
    grant = EnrolAnswer(attempt.accept(answer).grant, NOW)
    forged = encode_answer(grant, attempt.message, secret, key_from("mallory"), bytes(12))
    assert reason_of(attempt.accept, forged) == "bad-signature"


def test_a_code_of_another_root_is_refused_before_anything_is_sent() -> None:
    other = replace(CODE, root_fingerprint=bytes(16))
    assert reason_of(attempt_of, "anna", "", other) == "wrong-root"


def test_an_old_descriptor_is_refused_before_anything_is_sent() -> None:
    newer = replace(CODE, least_serial=2)
    assert reason_of(attempt_of, "anna", "", newer) == "serial-fell"
    later = replace(CODE, made_unix_seconds=EXPIRES)
    assert reason_of(attempt_of, "anna", "", later) == "descriptor-expired"
    attempt_of("anna", "", replace(CODE, made_unix_seconds=EXPIRES - 1))


def test_a_descriptor_that_expired_by_the_answer_s_time_enrols_nobody() -> None:
    office = Office()
    office.unix_clock.seconds = float(EXPIRES)
    office.token = replace(TOKEN, expires_unix_seconds=EXPIRES + 1)
    attempt = attempt_of("anna")
    answer = office.answer(attempt.message).answer
    assert reason_of(attempt.accept, answer) == "descriptor-expired"


def test_the_time_never_falls_below_the_code_s() -> None:
    office = Office()
    attempt = attempt_of("anna", code=replace(CODE, made_unix_seconds=NOW + 7))
    assert attempt.accept(office.answer(attempt.message).answer).time_unix_seconds == NOW + 7


def test_values_out_of_range_are_refused_at_construction() -> None:
    for device, handle, admission in [(15, 16, 32), (16, 15, 32), (16, 16, 31)]:
        with pytest.raises(ValueError, match="bytes"):
            Grant(bytes(device), bytes(handle), bytes(admission), 0)
    with pytest.raises(ValueError, match="shard"):
        Grant(bytes(16), bytes(16), bytes(32), 2**16)
    grant = Grant(bytes(16), bytes(16), b"k" * 32, 1)
    with pytest.raises(ValueError, match="nonce"):
        encode_answer(EnrolAnswer(grant, NOW), b"", bytes(32), SERVING.signing, b"")
    assert "kkkk" not in repr(grant)
    binding = CodeUse(bytes(32), grant)
    assert "bound=True" in repr(replace(TOKEN, binding=binding)) and "bound=False" in repr(TOKEN)


def test_the_ends_of_every_range_are_within_it() -> None:
    last = 2**40 - 1
    code = new_code(bytes(16), last, last, SeededBytes("last"))
    assert parse_code(code.to_text()) == code
    grant = Grant(bytes(16), bytes(16), bytes(32), 2**16 - 1)
    fields: dict[str, cbor.CborValue] = {
        "admission": bytes(32),
        "device": bytes(16),
        "handle": bytes(16),
        "shard": grant.shard,
    }
    latest = 2**63 - 1
    answer: dict[str, cbor.CborValue] = {"verdict": fields, "time": latest}
    assert decode_value(EnrolAnswer, answer) == EnrolAnswer(grant, latest)
    for wrong in (
        {"time": latest + 1},
        {"verdict": fields | {"shard": 2**16}},
        {"verdict": None},
        {"verdict": "another"},
    ):
        assert reason_of(decode_value, EnrolAnswer, answer | wrong) == "bad-field"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300))
def test_random_bytes_never_escape_as_another_error(data: bytes) -> None:
    office = Office()
    attempt = attempt_of("anna")
    info = enrol_info(DESCRIPTOR, Freshness(INCARNATION, 1))
    sealed = hpke.seal(hpke.public_key(DESCRIPTOR.hpke), info, data)
    for message in (data, prefix(MessageType.ENROL_REQUEST) + data, tagged(data), tagged(sealed)):
        with pytest.raises(WireError):
            office.answer(message)
    for message in (data, prefix(MessageType.ENROL_ANSWER) + data):
        with pytest.raises(WireError):
            attempt.accept(message)
