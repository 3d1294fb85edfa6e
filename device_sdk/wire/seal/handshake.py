"""Open and reply: the two messages that make a session, as bytes.

Open: ``version 1 | type 1 | descriptor serial 8 | incarnation 16 | counter 8 | admission tag 16 |
sealed``; reply: ``version 1 | type 1 | sealed``. What is sealed is ``signature 64 | canonical
CBOR`` in both. The device's state is a :class:`SessionOpening`; the aggregator's, and its order of
checks, are in :mod:`session_table`.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from dataclasses import dataclass
from typing import Annotated, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.fields import As, Declared, Key, Length
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
    Clock,
    admission_tag,
    check_admission,
)
from device_sdk.wire.seal.broadcast import GroupKey, GroupKeys
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.freshness import (
    FRESHNESS_BYTES,
    INCARNATION_BYTES,
    Freshness,
    Incarnation,
)
from device_sdk.wire.seal.keyring import HandshakeKeys
from device_sdk.wire.seal.keys import RandomBytes, draw
from device_sdk.wire.seal.session import (
    SECRET_BYTES,
    SESSION_ID_BYTES,
    End,
    Session,
    derive_session_keys,
)
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


# The device's end of a session that is not open yet.


@dataclass(frozen=True)
class DeviceCredential(Declared):
    """What enrolment left with the device."""

    device_id: DeviceId
    identity: Annotated[Ed25519PrivateKey, As(Any)]
    admission_key: AdmissionKey

    def __repr__(self) -> str:
        return f"DeviceCredential(device_id={self.device_id.hex()}, ...)"


@dataclass(frozen=True)
class OpenedSession:
    """A session and what came with it."""

    session: Session
    incarnation: bytes
    time_unix_seconds: int
    """The aggregator's time when it answered."""
    group_keys: tuple[GroupKey, ...]
    clash: bool = False
    """Whether another machine opened sessions with the same identity of late."""


class SessionOpening:
    """One attempt to open a session: :attr:`message` goes out, :meth:`accept` takes the reply.

    A resend within the attempt sends the same bytes; the aggregator answers them with the same
    reply. ``freshness``: of the life of the aggregator that is asked, with a counter that no other
    attempt ever had; it must be on the disk, flushed, before the message is sent.

    The ephemeral key and the secret are dropped as soon as a reply was accepted.
    """

    def __init__(
        self,
        credential: DeviceCredential,
        descriptor: Descriptor,
        freshness: Freshness,
        clock: Clock,
        *,
        run: bytes = bytes(RUN_BYTES),
        random_bytes: RandomBytes = os.urandom,
        seal: hpke.Seal = hpke.seal,
    ) -> None:
        ephemeral_seed = draw(random_bytes, hpke.SEED_BYTES)
        secret = draw(random_bytes, SECRET_BYTES)
        request = OpenRequest(credential.device_id, hpke.public_bytes(ephemeral_seed), secret, run)
        self.message = encode_open(
            request, credential.identity, credential.admission_key, descriptor, freshness, seal
        )
        self._descriptor = descriptor
        self._clock = clock
        self._secrets: tuple[hpke.PrivateKey, bytes] | None = (
            hpke.private_key(ephemeral_seed),
            secret,
        )

    def accept(
        self,
        reply_message: bytes,
        signed_unix_seconds: int,
        unseal: hpke.Unseal = hpke.unseal,
    ) -> OpenedSession:
        """The session that ``reply_message`` grants.

        ``signed_unix_seconds`` is the largest time that was signed under this descriptor, from the
        device's store: once it has expired it stays so.

        A reply that is not ours or not right raises ``WireError`` and changes nothing: anybody can
        send one, so the right one may still come. ``descriptor-expired`` (the descriptor expired by
        the time in the reply) and ``already-answered`` end the attempt.
        """
        if self._secrets is None:
            raise WireError("already-answered", "this open has had its reply")
        ephemeral, secret = self._secrets
        open_digest = hashlib.sha256(self.message).digest()
        reply = decode_reply(reply_message, open_digest, ephemeral, self._descriptor, unseal)
        self._secrets = None
        self._descriptor.require_unexpired(max(reply.time_unix_seconds, signed_unix_seconds))
        keys = derive_session_keys(secret, reply.secret, self.message, reply_message)
        session = Session(reply.session_id, keys, End.DEVICE, self._clock)
        return OpenedSession(
            session, reply.incarnation, reply.time_unix_seconds, reply.group_keys, reply.clash
        )


# No session: the aggregator's signed word to a device that it does not hold one.

_INCARNATION_AT = 2 + SESSION_ID_BYTES
_WAIT_AT = _INCARNATION_AT + INCARNATION_BYTES
_WAIT_BYTES = 4
_MOST_WAIT = 2 ** (8 * _WAIT_BYTES) - 1
MESSAGE_BYTES = _WAIT_AT + _WAIT_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True, slots=True)
class NoSession:
    """What such a message says. Proves nothing before :meth:`verify`."""

    session_id: bytes
    incarnation: bytes
    """The life of the aggregator that says it."""
    wait_seconds: float
    """Until another can be opened; 0 for soon."""
    signed: bytes
    signature: bytes

    def verify(self, handle: bytes, descriptor: Descriptor) -> None:
        """Raises ``WireError("bad-signature")`` unless it was said to the device of this handle."""
        signed = descriptor.digest + handle + self.signed
        key = signature.public_key(descriptor.sessions)
        signature.verify(key, Purpose.NO_SESSION, signed, self.signature)


def sign_no_session(
    session_id: bytes,
    incarnation: bytes,
    handle: bytes,
    descriptor: Descriptor,
    sessions: Ed25519PrivateKey,
    wait_seconds: float = 0.0,
) -> bytes:
    """The message, of 94 bytes; a wait is of at most 49 days."""
    milliseconds = min(_MOST_WAIT, math.ceil(1000 * wait_seconds))
    said: bytes = session_id + incarnation + milliseconds.to_bytes(_WAIT_BYTES, "little")
    signed = signature.sign(sessions, Purpose.NO_SESSION, descriptor.digest + handle + said)
    return prefix(MessageType.NO_SESSION) + said + signed


def read_no_session(message: bytes) -> NoSession:
    """Parse such a message. Raises ``WireError``."""
    check_prefix(message, MessageType.NO_SESSION, MESSAGE_BYTES, MESSAGE_BYTES)
    said, signed = message[2:-SIGNATURE_BYTES], message[-SIGNATURE_BYTES:]
    milliseconds = int.from_bytes(message[_WAIT_AT:-SIGNATURE_BYTES], "little")
    return NoSession(
        message[2:_INCARNATION_AT],
        message[_INCARNATION_AT:_WAIT_AT],
        milliseconds / 1000,
        said,
        signed,
    )
