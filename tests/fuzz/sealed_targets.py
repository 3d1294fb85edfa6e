"""Sealed messages: as strangers send them, and as somebody sends them who has the keys."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import lru_cache

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, decode, encode, prefix
from device_sdk.wire.publish.receipts import Receipt, read_update
from device_sdk.wire.seal import hpke, signature
from device_sdk.wire.seal.admission import (
    TAG_BYTES,
    AdmissionPurpose,
    TokenBuckets,
    WorkBudget,
    admission_tag,
)
from device_sdk.wire.seal.announcement import Presence, ServedTasks, announce, read_announcement
from device_sdk.wire.seal.broadcast import (
    BroadcastKeys,
    open_chunk,
    open_manifest,
    read_chunk_index,
)
from device_sdk.wire.seal.descriptor import (
    DELEGATION_BYTES,
    Descriptor,
    make_descriptor,
    make_succession,
    read_delegation,
    read_descriptor,
    read_line,
    root_of,
)
from device_sdk.wire.seal.enrolment import EnrolmentDesk, Token
from device_sdk.wire.seal.enrolment_message import (
    EnrolAnswer,
    EnrolHead,
    EnrolRefusal,
    EnrolRequest,
    Grant,
    _answer_cipher,
    decode_answer,
    decode_request,
    encode_request,
    requester_of,
)
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import (
    MESSAGE_BYTES,
    OpenHead,
    OpenRequest,
    SessionReply,
    decode_open,
    decode_reply,
    read_no_session,
    sign_no_session,
)
from device_sdk.wire.seal.keyring import Keyring
from device_sdk.wire.seal.keys import fingerprint
from device_sdk.wire.seal.session import Direction, DirectionKeys, EnvelopeCipher, read_header
from device_sdk.wire.seal.signature import Purpose
from tests.fakes.parties import (
    EXPIRES,
    INCARNATION,
    NOW,
    Clock,
    Fleet,
    key_from,
    make_credential,
    make_serving,
)
from tests.fuzz.codec_targets import vectors
from tests.fuzz.target import Target

_KEYS = DirectionKeys(bytes(32), bytes(12))
_CIPHER = EnvelopeCipher(_KEYS, Direction.UP)
_SERVING = make_serving()
_DESCRIPTOR = _SERVING.descriptor
_KEYRING = Keyring([_SERVING])
_FINGERPRINT = fingerprint(_DESCRIPTOR.root)
_ROOT, _DELEGATE = key_from("root"), key_from("delegate")
_SUCCESSION = make_succession(key_from("former root"), _DESCRIPTOR.root)
_LINE = (make_succession(key_from("first root"), _SUCCESSION.old), _SUCCESSION)
_BODY = _DESCRIPTOR.message[3 + DELEGATION_BYTES + signature.SIGNATURE_BYTES :]
_ANNA = make_credential("anna")
_IDENTITY = _ANNA.identity.public_key().public_bytes_raw()
_FRESHNESS = Freshness(INCARNATION, 1)
_OPEN_HEAD = OpenHead(1, _FRESHNESS)
_ENROL_HEAD = EnrolHead(1, bytes(8), requester_of(bytes(32)), _FRESHNESS)
_COUNTERS = itertools.count(1)
_OPEN_TAG_AT, _REQUEST_TAG_AT = 34, 58
_BROADCAST_KEYS = BroadcastKeys(bytes(32), bytes(32))
_DESK = EnrolmentDesk(
    _KEYRING, INCARNATION, TokenBuckets(1e9, 1e9, Clock()), WorkBudget(1.0, Clock()), Clock(NOW)
)


@lru_cache
def _fleet() -> Fleet:
    return Fleet(burst=1e9)


def _envelope(data: bytes) -> None:
    _CIPHER.open(data, read_header(data))


def _inside(data: bytes) -> None:
    """What a device that has a session may put into an envelope."""
    message = _CIPHER.seal(16, bytes(8), 1, data)
    payload = _CIPHER.open(message, read_header(message))
    assert payload == data
    read_update(payload, bytes(16))
    decode(Receipt, payload)


def _descriptor(data: bytes) -> None:
    read_descriptor(data, _FINGERPRINT)


def _signed_descriptor(data: bytes) -> None:
    """What a delegate could say."""
    head = b"\x00" + _DESCRIPTOR.delegation.to_bytes()
    signed = signature.sign(_DELEGATE, Purpose.DESCRIPTOR, head + data)
    read_descriptor(prefix(MessageType.DESCRIPTOR) + head + signed + data, _FINGERPRINT)


def _delegation(data: bytes) -> None:
    read_delegation(data)


def _signed_delegation(data: bytes) -> None:
    """What a root could say."""
    part = _DESCRIPTOR.root + data
    read_delegation(part + signature.sign(_ROOT, Purpose.DELEGATION, part))


def _successions(data: bytes) -> None:
    read_line(data, _DESCRIPTOR.root)


def _headed_descriptor(data: bytes) -> None:
    """Successions, delegation and all of a stranger's, who is trusted as a root."""
    read_descriptor(data, fingerprint(data[3:35]))
    root_of(data)


def _presence(data: bytes) -> None:
    signed = signature.sign(_SERVING.signing, Purpose.PRESENCE, _DESCRIPTOR.digest + data)
    read_announcement(Presence, prefix(MessageType.PRESENCE) + signed + data, _DESCRIPTOR)


def _tasks(data: bytes) -> None:
    """What whoever holds the signing key could say; what is taken is said again in no other way."""
    signed = signature.sign(_SERVING.signing, Purpose.TASKS, _DESCRIPTOR.digest + data)
    message = prefix(MessageType.TASKS) + signed + data
    assert (
        announce(
            read_announcement(ServedTasks, message, _DESCRIPTOR), _DESCRIPTOR, _SERVING.signing
        )
        == message
    )


def _open(data: bytes) -> None:
    """All that the table does with an open of whoever has not the admission key."""
    _fleet().grant(data)


def _tagged_open(data: bytes) -> None:
    """What an insider's admission key gets past the tag."""
    head, sealed = data[:_OPEN_TAG_AT], data[_OPEN_TAG_AT:]
    tag = admission_tag(_ANNA.admission_key, AdmissionPurpose.SESSION_OPEN, data)
    _open(head + tag + sealed)


def _unsealed_open(data: bytes) -> None:
    decode_open(
        bytes(64), _OPEN_HEAD, _ANNA.device_id, _IDENTITY, _SERVING,
        unseal=lambda *_: bytes(64) + data,
    )  # fmt: skip


def _reply(data: bytes) -> None:
    digest = bytes(32)
    signed = signature.sign(_SERVING.sessions, Purpose.SESSION_REPLY, digest + data)
    message = prefix(MessageType.SESSION_REPLY) + b"sealed"
    private = hpke.private_key(bytes(hpke.SEED_BYTES))
    decode_reply(message, digest, private, _DESCRIPTOR, unseal=lambda *_: signed + data)


def _request(data: bytes) -> None:
    _DESK.answer(data, Token(_DESK.read_head(data).token_id, bytes(16), NOW))


def _tagged_request(data: bytes) -> None:
    """What a code's secret gets past the tag."""
    head, sealed = data[:_REQUEST_TAG_AT], data[_REQUEST_TAG_AT:]
    _request(head + admission_tag(bytes(16), AdmissionPurpose.ENROL, data) + sealed)


def _unsealed_request(data: bytes) -> None:
    decode_request(bytes(64), _ENROL_HEAD, bytes(16), _SERVING, unseal=lambda *_: bytes(64) + data)


def _answer(data: bytes) -> None:
    decode_answer(data, b"request", bytes(32), _DESCRIPTOR)


def _unsealed_answer(data: bytes) -> None:
    """What an aggregator could say in a right seal, and rightly signed."""
    digest = hashlib.sha256(b"request").digest()
    signed = signature.sign(_SERVING.signing, Purpose.ENROL_ANSWER, digest + data)
    head, nonce = prefix(MessageType.ENROL_ANSWER), bytes(12)
    sealed = _answer_cipher(bytes(32), digest).encrypt(nonce, signed + data, head)
    decode_answer(head + nonce + sealed, b"request", bytes(32), _DESCRIPTOR)


def _table(data: bytes) -> None:
    """The aggregator's table of sessions, fed by a stranger."""
    _fleet().table.receive(data, _ANNA.device_id)


def _no_session(data: bytes) -> None:
    denial = read_no_session(data)
    assert len(data) == MESSAGE_BYTES
    denial.verify(bytes(16), _DESCRIPTOR)


def _broadcast_parts(data: bytes) -> None:
    """A manifest or chunk made by somebody who knows the group key and not the signing key."""
    public = _SERVING.signing.public_key()
    try:
        open_manifest(data, _BROADCAST_KEYS, public)
    except WireError:
        index = read_chunk_index(data)
        open_chunk(data, _BROADCAST_KEYS, data[-32:], index, hashlib.sha256(data).digest())
        raise


def _messages(*path: str) -> Sequence[bytes]:
    value = vectors("sealing")
    for key in path:
        value = value[key]
    return [bytes.fromhex(str(value))]


_WIRE = (WireError,)


def _body_of(message: bytes, start: int) -> list[bytes]:
    return [message[start:]]


SEALED_TARGETS = (
    Target(
        "envelope",
        _envelope,
        lambda: [_CIPHER.seal(16, bytes(8), 1, b"payload")],
        _WIRE,
    ),
    Target("inside", _inside, lambda: [bytes(40)], _WIRE),
    Target("descriptor", _descriptor, lambda: [_DESCRIPTOR.message], _WIRE),
    Target("signed-descriptor", _signed_descriptor, lambda: [_BODY], _WIRE),
    Target(
        "headed-descriptor",
        _headed_descriptor,
        lambda: [_DESCRIPTOR.message, _succeeded().message],
        _WIRE,
    ),
    Target("delegation", _delegation, lambda: [_DESCRIPTOR.delegation.to_bytes()], _WIRE),
    Target(
        "signed-delegation",
        _signed_delegation,
        lambda: [_DESCRIPTOR.delegation.signed_part()[32:]],
        _WIRE,
    ),
    Target(
        "successions",
        _successions,
        lambda: [_SUCCESSION.to_bytes(), b"".join(each.to_bytes() for each in _LINE)],
        _WIRE,
    ),
    Target(
        "presence",
        _presence,
        lambda: _body_of(_messages("presence", "message")[0], 66),
        _WIRE,
    ),
    Target(
        "tasks",
        _tasks,
        lambda: _body_of(_messages("tasks", "message")[0], 66),
        _WIRE,
    ),
    Target("no-session", _no_session, lambda: [_denial(), _denial(90.0)], _WIRE),
    Target("open", _open, lambda: [_open_message()], _WIRE),
    Target("tagged-open", _tagged_open, lambda: [_untagged(_open_message(), _OPEN_TAG_AT)], _WIRE),
    Target("unsealed-open", _unsealed_open, lambda: [_open_body()], _WIRE),
    Target("reply", _reply, lambda: [_reply_body()], _WIRE),
    Target("request", _request, lambda: [_request_message()], _WIRE),
    Target(
        "tagged-request",
        _tagged_request,
        lambda: [_untagged(_request_message(), _REQUEST_TAG_AT)],
        _WIRE,
    ),
    Target("unsealed-request", _unsealed_request, lambda: [_request_body()], _WIRE),
    Target("answer", _answer, lambda: [prefix(MessageType.ENROL_ANSWER) + bytes(80)], _WIRE),
    Target("unsealed-answer", _unsealed_answer, lambda: _answer_bodies(), _WIRE),
    Target("sessions", _table, lambda: [_CIPHER.seal(16, bytes(8), 1, b"payload")], _WIRE),
    Target(
        "publication",
        _broadcast_parts,
        lambda: [prefix(MessageType.CHUNK) + bytes(60), prefix(MessageType.MANIFEST) + bytes(200)],
        _WIRE,
    ),
)


def _denial(wait_seconds: float = 0.0) -> bytes:
    key = _SERVING.sessions
    return sign_no_session(bytes(8), INCARNATION, bytes(16), _DESCRIPTOR, key, wait_seconds)


def _open_message() -> bytes:
    return _fleet().opening().message


def _untagged(message: bytes, tag_at: int) -> bytes:
    return message[:tag_at] + message[tag_at + TAG_BYTES :]


def _open_body() -> bytes:
    return encode(OpenRequest(_ANNA.device_id, bytes(hpke.PUBLIC_KEY_BYTES), bytes(32)))


def _reply_body() -> bytes:
    return encode(SessionReply(bytes(8), bytes(32), bytes(16), NOW, _fleet().group_keys))


def _request_message() -> bytes:
    identity, freshness = key_from("identity"), Freshness(INCARNATION, next(_COUNTERS))
    return encode_request(_enrol_request(), identity, bytes(16), _DESCRIPTOR, freshness)


def _enrol_request() -> EnrolRequest:
    identity = key_from("identity").public_key().public_bytes_raw()
    return EnrolRequest(bytes(8), identity, bytes(16), bytes(32))


def _answer_bodies() -> list[bytes]:
    ids = bytes(16), bytes(16), bytes(32)
    granted = Grant(*ids, 0), Grant(*ids, 5, "north.example:8883")
    return [encode(EnrolAnswer(each, NOW)) for each in (*granted, EnrolRefusal.REVOKED)]


def _succeeded() -> Descriptor:
    """Under a root that took another's place."""
    return make_descriptor(
        _DELEGATE,
        _DESCRIPTOR.delegation,
        1,
        NOW,
        EXPIRES,
        _DESCRIPTOR.signing,
        _DESCRIPTOR.sessions,
        _DESCRIPTOR.hpke,
        (_SUCCESSION,),
    )


def _request_body() -> bytes:
    return cbor.encode(
        {
            "identity": bytes(32),
            "mailbox": bytes(16),
            "proof": bytes(32),
            "secret": bytes(32),
            "token": bytes(8),
        }
    )
