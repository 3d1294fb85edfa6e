"""No session: the aggregator's signed word to a device that it does not hold a session.

Bytes: ``version 1 | type 1 | session id 8 | incarnation 16 | signature 64``; signed by the signing
key of the descriptor in force, over SHA-256(descriptor) || handle || session id || incarnation.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from device_sdk.wire.codec.message import MessageType, check_prefix, prefix
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.freshness import INCARNATION_BYTES
from device_sdk.wire.seal.session import SESSION_ID_BYTES
from device_sdk.wire.seal.signature import SIGNATURE_BYTES, Purpose

_INCARNATION_AT = 2 + SESSION_ID_BYTES
_SIGNATURE_AT = _INCARNATION_AT + INCARNATION_BYTES
MESSAGE_BYTES = _SIGNATURE_AT + SIGNATURE_BYTES


@dataclass(frozen=True, slots=True)
class NoSession:
    """What such a message says. Proves nothing before :meth:`verify`."""

    session_id: bytes
    incarnation: bytes
    """The life of the aggregator that says it."""
    signature: bytes

    def verify(self, handle: bytes, descriptor: Descriptor, signing: Ed25519PublicKey) -> None:
        """Raises ``WireError("bad-signature")`` unless it was said to the device of this handle."""
        signed = descriptor.digest + handle + self.session_id + self.incarnation
        signature.verify(signing, Purpose.NO_SESSION, signed, self.signature)


def sign_no_session(
    session_id: bytes,
    incarnation: bytes,
    handle: bytes,
    descriptor: Descriptor,
    signing: Ed25519PrivateKey,
) -> bytes:
    """The message, 90 bytes."""
    said = session_id + incarnation
    signed = signature.sign(signing, Purpose.NO_SESSION, descriptor.digest + handle + said)
    return prefix(MessageType.NO_SESSION) + said + signed


def read_no_session(message: bytes) -> NoSession:
    """Parse such a message. Raises ``WireError``."""
    check_prefix(message, MessageType.NO_SESSION, MESSAGE_BYTES, MESSAGE_BYTES)
    return NoSession(
        message[2:_INCARNATION_AT],
        message[_INCARNATION_AT:_SIGNATURE_AT],
        message[_SIGNATURE_AT:],
    )
