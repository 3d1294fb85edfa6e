"""Open and reply: the two messages that make a session, as bytes.

Open: ``version 1 | type 1 | descriptor serial 8 | incarnation 16 | counter 8 | admission tag 16 |
sealed``; reply: ``version 1 | type 1 | sealed``. What is sealed is ``signature 64 | canonical
CBOR`` in both. State and order of checks are in :mod:`device_session` (device) and
:mod:`session_table` (aggregator).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.fields import Key, Length
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import (
    Count,
    MessageType,
    Record,
    check_prefix,
    decode,
    encode,
    prefix,
)
from device_sdk.wire.seal import hpke, signature
from device_sdk.wire.seal.admission import (
    TAG_BYTES,
    AdmissionPurpose,
    admission_tag,
    check_admission,
)
from device_sdk.wire.seal.broadcast import GroupKeys
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.freshness import FRESHNESS_BYTES, Freshness, Incarnation
from device_sdk.wire.seal.keyring import HandshakeKeys
from device_sdk.wire.seal.session import SECRET_BYTES, SESSION_ID_BYTES
from device_sdk.wire.seal.signature import SIGNATURE_BYTES, Purpose

DEVICE_ID_BYTES = 16
ADMISSION_KEY_BYTES = 32
RUN_BYTES = 8
MAX_OPEN_BYTES = 4096
MAX_REPLY_BYTES = 4096

_SERIAL = struct.Struct("<Q")
_FRESHNESS_AT = 2 + _SERIAL.size
_TAG_AT = _FRESHNESS_AT + FRESHNESS_BYTES
_SEALED_AT = _TAG_AT + TAG_BYTES


@dataclass(frozen=True, slots=True)
class OpenHead:
    """What an open says in clear. Proves nothing yet."""

    serial: int
    """Of the descriptor that it was sealed to."""
    freshness: Freshness


DeviceId = Annotated[bytes, Length(DEVICE_ID_BYTES)]
AdmissionKey = Annotated[bytes, Length(ADMISSION_KEY_BYTES)]
Secret = Annotated[bytes, Length(SECRET_BYTES)]


@dataclass(frozen=True)
class OpenRequest(Record):
    """What a device asks for in an open."""

    device_id: Annotated[DeviceId, Key("device")]
    ephemeral: Annotated[bytes, Length(hpke.PUBLIC_KEY_BYTES)]
    """HPKE public key for the reply."""
    secret: Secret
    """s_d."""
    run: Annotated[bytes, Length(RUN_BYTES)] = bytes(RUN_BYTES)
    """Drawn each time that the device starts: who asks, where two have one identity."""

    MOST_BYTES = MAX_OPEN_BYTES


@dataclass(frozen=True)
class SessionReply(Record):
    """What the aggregator answers."""

    session_id: Annotated[bytes, Length(SESSION_ID_BYTES), Key("session")]
    secret: Secret
    """s_a."""
    incarnation: Incarnation
    """Of the life which answers, the one that the open named."""
    time_unix_seconds: Annotated[Count, Key("time")]
    """The aggregator's time."""
    group_keys: Annotated[GroupKeys, Key("keys")]
    clash: bool = False
    """Whether two machines opened sessions with this identity within the last hour."""

    MOST_BYTES = MAX_REPLY_BYTES


def open_info(descriptor: Descriptor, freshness: Freshness) -> bytes:
    """HPKE's info for an open: bound to every byte of the descriptor, and to this one time."""
    return b"tessera/1 open" + descriptor.digest + freshness.to_bytes()


def reply_info(open_digest: bytes) -> bytes:
    """HPKE's info for the reply: bound by its SHA-256 to every byte of the open message."""
    return b"tessera/1 reply" + open_digest


def encode_open(
    request: OpenRequest,
    identity: Ed25519PrivateKey,
    admission_key: bytes,
    descriptor: Descriptor,
    freshness: Freshness,
    seal: hpke.Seal = hpke.seal,
) -> bytes:
    """The open message, signed, sealed and tagged."""
    info = open_info(descriptor, freshness)
    body = encode(request)
    signed = signature.sign(identity, Purpose.SESSION_OPEN, info + body)
    sealed = seal(hpke.public_key(descriptor.hpke), info, signed + body)
    serial = _SERIAL.pack(descriptor.serial)
    head = prefix(MessageType.SESSION_OPEN) + serial + freshness.to_bytes()
    tag = admission_tag(admission_key, AdmissionPurpose.SESSION_OPEN, head + sealed)
    return head + tag + sealed


def read_open_head(message: bytes) -> OpenHead:
    """What an open says in clear. Raises ``WireError``: a parser's reason."""
    check_prefix(message, MessageType.SESSION_OPEN, _SEALED_AT, MAX_OPEN_BYTES)
    (serial,) = _SERIAL.unpack_from(message, 2)
    return OpenHead(serial, Freshness.from_bytes(message, _FRESHNESS_AT))


def check_open_tag(message: bytes, admission_key: bytes) -> None:
    """Judge the tag of an open whose head was read. Raises ``WireError("bad-admission")``."""
    covered = message[:_TAG_AT] + message[_SEALED_AT:]
    tag = message[_TAG_AT:_SEALED_AT]
    check_admission(admission_key, AdmissionPurpose.SESSION_OPEN, covered, tag)


def decode_open(
    message: bytes,
    head: OpenHead,
    device_id: bytes,
    identity: bytes,
    keys: HandshakeKeys,
    unseal: hpke.Unseal = hpke.unseal,
) -> OpenRequest:
    """Unseal and verify an admitted open against the registry's row of the device.

    Raises ``WireError``: ``cannot-unseal``, ``wrong-device``, ``bad-signature``, or a parser's.
    """
    info = open_info(keys.descriptor, head.freshness)
    signed, body = _split(unseal(keys.hpke, info, message[_SEALED_AT:]))
    request = decode(OpenRequest, body)
    if request.device_id != device_id:
        raise WireError("wrong-device", "opened by another device than the topic's")
    signature.verify(signature.public_key(identity), Purpose.SESSION_OPEN, info + body, signed)
    return request


def encode_reply(
    reply: SessionReply,
    open_digest: bytes,
    ephemeral: bytes,
    sessions: Ed25519PrivateKey,
    seal: hpke.Seal = hpke.seal,
) -> bytes:
    """The reply, signed and sealed to the open's ephemeral key.

    ``open_digest``: SHA-256 of the whole open message.
    Raises ``WireError("bad-key")`` when the device's ephemeral key is none.
    """
    body = encode(reply)
    signed = signature.sign(sessions, Purpose.SESSION_REPLY, open_digest + body)
    sealed = seal(hpke.public_key(ephemeral), reply_info(open_digest), signed + body)
    return prefix(MessageType.SESSION_REPLY) + sealed


def decode_reply(
    message: bytes,
    open_digest: bytes,
    ephemeral: hpke.PrivateKey,
    descriptor: Descriptor,
    unseal: hpke.Unseal = hpke.unseal,
) -> SessionReply:
    """Unseal and verify a reply. Raises ``WireError`` as :func:`decode_open` does."""
    check_prefix(message, MessageType.SESSION_REPLY, 2, MAX_REPLY_BYTES)
    signed, body = _split(unseal(ephemeral, reply_info(open_digest), message[2:]))
    signature.verify(
        signature.public_key(descriptor.sessions),
        Purpose.SESSION_REPLY,
        open_digest + body,
        signed,
    )
    return decode(SessionReply, body)


def _split(opened: bytes) -> tuple[bytes, bytes]:
    if len(opened) < SIGNATURE_BYTES:
        raise WireError("truncated", "no room for a signature")
    return opened[:SIGNATURE_BYTES], opened[SIGNATURE_BYTES:]
