"""No session: the aggregator's signed word to a device that it does not hold a session.

Bytes: ``version 1 | type 1 | session id 8 | incarnation 16 | wait 4 | signature 64``; signed by
the sessions' key of the descriptor in force, over SHA-256(descriptor) || handle and what stands
between type and signature. ``wait``, in milliseconds, is until another session can be opened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec.message import MessageType, check_prefix, prefix
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.freshness import INCARNATION_BYTES
from device_sdk.wire.seal.session import SESSION_ID_BYTES
from device_sdk.wire.seal.signature import SIGNATURE_BYTES, Purpose

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
