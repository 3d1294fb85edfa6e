"""Successor: the aggregator's signed word on the broker that takes the place of the one in use.

Bytes: ``version 1 | type 11 | signature 64 | body``, the body canonical CBOR of {revision, until,
url}; signed by the signing key of the descriptor in force, over SHA-256(descriptor) || body.

The word alone moves nobody for good. A device looks for the aggregator there, and is there only
where it found it, by a session; it knows the broker of before until the grace is over and keys
newer than those that signed have said the same by a session. So who shows old words, or has stolen
the keys of one descriptor, can lead devices astray no longer than those keys hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, Record, check_prefix, prefix
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.signature import Purpose

MAX_BYTES = 1024
MOST_URL_BYTES = 512
_BODY_AT = 2 + signature.SIGNATURE_BYTES
MOST_REVISION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Successor:
    """Raises ValueError, naming what is wrong."""

    revision: int
    """Rises with each word that one descriptor's key signs; a newer descriptor's word is newer."""
    url: str
    """Where the next broker is, without user and password; empty: nowhere, stay."""
    until_unix_seconds: int
    """Up to then the aggregator is heard at both."""

    def __post_init__(self) -> None:
        for name in ("revision", "until_unix_seconds"):
            if not 0 <= getattr(self, name) <= MOST_REVISION:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 to 2^63 - 1")
        if len(self.url.encode()) > MOST_URL_BYTES:
            raise ValueError(f"a broker's URL has at most {MOST_URL_BYTES} bytes")


def sign_successor(
    successor: Successor, descriptor: Descriptor, signing: Ed25519PrivateKey
) -> bytes:
    """The retained message. Published anew after a rotation: it names the descriptor in force."""
    body = cbor.encode(
        {
            "revision": successor.revision,
            "until": successor.until_unix_seconds,
            "url": successor.url,
        }
    )
    signed = signature.sign(signing, Purpose.SUCCESSOR, descriptor.digest + body)
    return prefix(MessageType.SUCCESSOR) + signed + body


def read_successor(message: bytes, descriptor: Descriptor) -> Successor:
    """Verify it. Raises ``WireError``: ``bad-signature``, or a parser's reason."""
    check_prefix(message, MessageType.SUCCESSOR, _BODY_AT + 1, MAX_BYTES)
    body = message[_BODY_AT:]
    key = signature.public_key(descriptor.signing)
    signature.verify(key, Purpose.SUCCESSOR, descriptor.digest + body, message[2:_BODY_AT])
    record = Record(cbor.decode(body, limit_bytes=MAX_BYTES), ("revision", "until", "url"))
    try:
        return Successor(
            record.unsigned("revision", MOST_REVISION),
            record.text("url", MOST_URL_BYTES),
            record.unsigned("until", MOST_REVISION),
        )
    except ValueError as error:
        raise WireError("bad-field", str(error)) from error
