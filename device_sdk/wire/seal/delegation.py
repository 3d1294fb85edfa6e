"""The delegation: what the root lets an online key, the delegate, sign in its place, and how long.

Bytes: ``root 32 | delegate 32 | first serial 8 | last serial 8 | expires 8 | signature 64``, the
signature by the root over the 88 bytes before it. The serials of two delegations never overlap: who
has seen a descriptor of the later one, or holds a code made under it, accepts nothing that the
earlier delegate ever signs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.signature import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Purpose

SERIAL_LIMIT = 2**40 - 1  # what an enrolment code has room for
_TIME_LIMIT = 2**63 - 1  # what the stores' signed integers hold
_NUMBERS = struct.Struct("<QQQ")
_SIGNED_BYTES = 2 * PUBLIC_KEY_BYTES + _NUMBERS.size
DELEGATION_BYTES = _SIGNED_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True)
class Delegation:
    """A delegation as the root signed it."""

    root: bytes
    """Public key of the root, 32 bytes."""
    delegate: bytes
    """Public key of the delegate, 32 bytes."""
    first_serial: int
    last_serial: int
    expires_unix_seconds: int
    """No descriptor of the delegate may hold for longer."""
    signed: bytes
    """64 bytes."""

    def __post_init__(self) -> None:
        if not 0 < self.first_serial <= self.last_serial <= SERIAL_LIMIT:
            raise ValueError("a delegation's serials must rise and lie between 1 and 2^40 - 1")
        if not 0 < self.expires_unix_seconds <= _TIME_LIMIT:
            raise ValueError("a delegation's expiry must lie between 1 and 2^63 - 1")

    def to_bytes(self) -> bytes:
        """152 bytes."""
        return self.signed_part() + self.signed

    def signed_part(self) -> bytes:
        """The 88 bytes that the signature covers."""
        numbers = _NUMBERS.pack(self.first_serial, self.last_serial, self.expires_unix_seconds)
        return self.root + self.delegate + numbers

    def allows(self, serial: int, expires_unix_seconds: int) -> bool:
        """Whether the delegate may sign a descriptor of this serial and expiry."""
        return (
            self.first_serial <= serial <= self.last_serial
            and expires_unix_seconds <= self.expires_unix_seconds
        )


def make_delegation(
    root: Ed25519PrivateKey,
    delegate: bytes,
    first_serial: int,
    last_serial: int,
    expires_unix_seconds: int,
) -> Delegation:
    """Sign a delegation with the root key. Raises ``ValueError`` for values out of range."""
    if len(delegate) != PUBLIC_KEY_BYTES:
        raise ValueError(f"expected a public key of {PUBLIC_KEY_BYTES} bytes, got {len(delegate)}")
    root_public = root.public_key().public_bytes_raw()
    unsigned = Delegation(
        root_public, delegate, first_serial, last_serial, expires_unix_seconds, b""
    )
    signed = signature.sign(root, Purpose.DELEGATION, unsigned.signed_part())
    return read_delegation(unsigned.signed_part() + signed)


def read_delegation(data: bytes) -> Delegation:
    """Verify a delegation by the root that it names; whether that root is trusted is not judged.

    Raises ``WireError``: ``bad-delegation``, ``bad-key``, ``bad-signature``.
    """
    if len(data) != DELEGATION_BYTES:
        raise WireError("bad-delegation", f"a delegation has {DELEGATION_BYTES} bytes")
    root = data[:PUBLIC_KEY_BYTES]
    signed = data[_SIGNED_BYTES:]
    key = signature.public_key(root)
    signature.verify(key, Purpose.DELEGATION, data[:_SIGNED_BYTES], signed)
    delegate = data[PUBLIC_KEY_BYTES : 2 * PUBLIC_KEY_BYTES]
    signature.public_key(delegate)
    first, last, expires = _NUMBERS.unpack_from(data, 2 * PUBLIC_KEY_BYTES)
    try:
        return Delegation(root, delegate, first, last, expires, signed)
    except ValueError as error:
        raise WireError("bad-delegation", str(error)) from error
