"""Ed25519 signatures, each bound to one purpose by a label."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from device_sdk.fields import Length
from device_sdk.wire.codec.errors import WireError

SIGNATURE_BYTES = 64
PUBLIC_KEY_BYTES = 32
PublicKey = Annotated[bytes, Length(PUBLIC_KEY_BYTES)]

_FIELD = 2**255 - 19
_ORDER_8_Y = 2707385501144840649318225287225658788936804267575313519463743609750303402022
# The y coordinates of the eight points of small order (a signature that anybody can make verifies
# under such a "key"), with those that also have a second, non-canonical encoding.
_SMALL_ORDER_Y = frozenset({0, 1, _FIELD - 1, _FIELD, _FIELD + 1, _ORDER_8_Y, _FIELD - _ORDER_8_Y})


class Purpose(Enum):
    """What a signature is for. The value is the label that the signature covers."""

    DESCRIPTOR = b"tessera/1 descriptor"
    DELEGATION = b"tessera/1 delegation"
    SUCCESSION = b"tessera/1 succession"
    PRESENCE = b"tessera/1 presence"
    TASKS = b"tessera/1 tasks"
    ENROL_REQUEST = b"tessera/1 enrol request"
    ENROL_ANSWER = b"tessera/1 enrol answer"
    SESSION_OPEN = b"tessera/1 session open"
    SESSION_REPLY = b"tessera/1 session reply"
    MANIFEST = b"tessera/1 manifest"
    NO_SESSION = b"tessera/1 no session"
    SUCCESSOR = b"tessera/1 successor"


def sign(key: Ed25519PrivateKey, purpose: Purpose, message: bytes) -> bytes:
    """64 bytes: Ed25519 over label || 0x00 || message."""
    return key.sign(purpose.value + b"\x00" + message)


def verify(key: Ed25519PublicKey, purpose: Purpose, message: bytes, signature: bytes) -> None:
    """Raises ``WireError("bad-signature")`` unless ``signature`` was made by :func:`sign`."""
    try:
        key.verify(signature, purpose.value + b"\x00" + message)
    except InvalidSignature as error:
        raise WireError(
            "bad-signature", f"the {purpose.name.lower()} signature is wrong"
        ) from error


def public_key(raw: bytes) -> Ed25519PublicKey:
    """The key of 32 raw bytes. Raises ``WireError("bad-key")``; small-order points are refused."""
    try:
        key = Ed25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise WireError("bad-key", "an Ed25519 public key is 32 bytes long") from error
    y = int.from_bytes(raw, "little") & (2**255 - 1)
    if y in _SMALL_ORDER_Y:
        raise WireError("bad-key", "an Ed25519 public key of small order identifies nobody")
    return key
