"""The descriptor: which keys the aggregator uses now, signed by the root.

Bytes: ``version 1 | type 1 | root public key 32 | signature 64 | body``, the body canonical CBOR of
{expires, hpke, serial, signing}. The signature covers root public key || body.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire import cbor, hpke, signature
from device_sdk.wire.errors import WireError
from device_sdk.wire.header import MessageType, check_prefix, prefix
from device_sdk.wire.keys import fingerprint
from device_sdk.wire.record import Record
from device_sdk.wire.signature import Purpose

MAX_BYTES = 2048
SERIAL_LIMIT = 2**63 - 1  # what the stores' signed integers hold
_BODY_AT = 2 + signature.PUBLIC_KEY_BYTES + signature.SIGNATURE_BYTES
_FIELDS = ("expires", "hpke", "serial", "signing")


@dataclass(frozen=True)
class Descriptor:
    """A descriptor whose signature was found right."""

    root: bytes
    """Root Ed25519 public key, 32 bytes."""
    serial: int
    expires_unix_seconds: int
    signing: bytes
    """Ed25519 public key of the aggregator's online signing key, 32 bytes."""
    hpke: bytes
    """The aggregator's HPKE public key, 1,216 bytes."""
    digest: bytes
    """SHA-256 of the whole message."""
    message: bytes
    """The message itself, to be kept or published."""

    def require_unexpired(self, now_unix_seconds: int) -> None:
        """Raises ``WireError("descriptor-expired")`` from the second of its expiry on."""
        if now_unix_seconds >= self.expires_unix_seconds:
            raise WireError(
                "descriptor-expired",
                f"descriptor {self.serial} expired; the operator has to publish a newer one",
            )


@dataclass(frozen=True)
class DescriptorSeen:
    """What a device stores of the newest descriptor it has accepted."""

    serial: int
    digest: bytes


def make_descriptor(
    root: Ed25519PrivateKey,
    serial: int,
    expires_unix_seconds: int,
    signing: bytes,
    hpke_public: bytes,
) -> Descriptor:
    """Sign a new descriptor with the root key. Raises ``ValueError`` for values out of range."""
    if not 0 < serial <= SERIAL_LIMIT or not 0 < expires_unix_seconds <= SERIAL_LIMIT:
        raise ValueError("serial and expiry must lie between 1 and 2^63 - 1")
    if len(signing) != signature.PUBLIC_KEY_BYTES or len(hpke_public) != hpke.PUBLIC_KEY_BYTES:
        raise ValueError(
            f"expected public keys of {signature.PUBLIC_KEY_BYTES} bytes (signing) and "
            f"{hpke.PUBLIC_KEY_BYTES} (HPKE), got {len(signing)} and {len(hpke_public)}"
        )
    root_public = root.public_key().public_bytes_raw()
    body = cbor.encode(
        {
            "expires": expires_unix_seconds,
            "hpke": hpke_public,
            "serial": serial,
            "signing": signing,
        }
    )
    signed = signature.sign(root, Purpose.DESCRIPTOR, root_public + body)
    message = prefix(MessageType.DESCRIPTOR) + root_public + signed + body
    return read_descriptor(message, fingerprint(root_public))


def read_descriptor(
    message: bytes, root_fingerprint: bytes, seen: DescriptorSeen | None = None
) -> Descriptor:
    """Verify a descriptor message against the root's fingerprint (16 bytes).

    Expiry is not judged here: before a session's reply the device does not know the time.
    Raises ``WireError``: ``wrong-root``, ``bad-signature``, ``bad-key``, ``serial-fell`` (below the
    one seen), ``serial-reused`` (the serial seen, other content), or what the parsers raise.
    """
    check_prefix(message, MessageType.DESCRIPTOR, _BODY_AT + 1, MAX_BYTES)
    root = message[2 : 2 + signature.PUBLIC_KEY_BYTES]
    if fingerprint(root) != root_fingerprint:
        raise WireError("wrong-root", "signed by another root than the enrolment code names")
    signed = message[2 + signature.PUBLIC_KEY_BYTES : _BODY_AT]
    body = message[_BODY_AT:]
    signature.verify(signature.public_key(root), Purpose.DESCRIPTOR, root + body, signed)
    record = Record.decode(body, _FIELDS, limit_bytes=MAX_BYTES)
    descriptor = Descriptor(
        root=root,
        serial=record.unsigned("serial", SERIAL_LIMIT),
        expires_unix_seconds=record.unsigned("expires", SERIAL_LIMIT),
        signing=record.octets("signing", signature.PUBLIC_KEY_BYTES),
        hpke=record.octets("hpke", hpke.PUBLIC_KEY_BYTES),
        digest=hashlib.sha256(message).digest(),
        message=message,
    )
    signature.public_key(descriptor.signing)
    hpke.public_key(descriptor.hpke)
    if seen is not None:
        _require_newer(descriptor, seen)
    return descriptor


def _require_newer(descriptor: Descriptor, seen: DescriptorSeen) -> None:
    if descriptor.serial < seen.serial:
        raise WireError(
            "serial-fell", f"serial {descriptor.serial} is below {seen.serial}, seen before"
        )
    if descriptor.serial == seen.serial and descriptor.digest != seen.digest:
        raise WireError(
            "serial-reused", f"serial {descriptor.serial} was seen before with other content"
        )
