"""Who speaks for a fleet's root key: its delegate, and the roots that came after it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.fields import Declared, Within
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.signature import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    PublicKey,
    Purpose,
)

# Successions: how one root key hands over to the next.
#
# Bytes of one: ``old root 32 | new root 32 | signature 64``, the signature by the old root over
# the 64 bytes before it. A line of successions is their bytes, oldest first; at most
# :data:`MOST_SUCCESSIONS`, so that who slept through more has to be told the root by an
# enrolment code. Neither number nor time is in it: each new root is a fresh key, so the keys
# alone make the order, and no succession is ever withdrawn.

MOST_SUCCESSIONS = 8
_SUCCESSION_BYTES = 2 * PUBLIC_KEY_BYTES
SUCCESSION_BYTES = _SUCCESSION_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True)
class Succession(Declared):
    """One root's word that another takes its place."""

    old: PublicKey
    """Of the root that signed."""
    new: PublicKey
    """Of its successor."""
    signed: bytes
    """64 bytes."""

    def to_bytes(self) -> bytes:
        """128 bytes."""
        return self.old + self.new + self.signed


def make_succession(old: Ed25519PrivateKey, new: bytes) -> Succession:
    """Hand over from ``old`` to the root with the public key ``new``. Raises ``ValueError``."""
    old_public = old.public_key().public_bytes_raw()
    return Succession(old_public, new, signature.sign(old, Purpose.SUCCESSION, old_public + new))


def read_line(data: bytes, root: bytes) -> tuple[Succession, ...]:
    """The successions in ``data``, which must lead without a gap to the public key ``root``.

    Raises ``WireError``: ``bad-succession`` (too many, a gap, a branch, a root that comes twice),
    ``bad-key``, ``bad-signature``.
    """
    count, rest = divmod(len(data), SUCCESSION_BYTES)
    if rest or count > MOST_SUCCESSIONS:
        raise WireError("bad-succession", f"{len(data)} bytes are no line of successions")
    line = tuple(
        _parse(data[place * SUCCESSION_BYTES : (place + 1) * SUCCESSION_BYTES])
        for place in range(count)
    )
    roots = [each.old for each in line] + [root]
    if [each.new for each in line] != roots[1:]:
        raise WireError("bad-succession", "the successions do not lead from root to root")
    if len(set(roots)) != len(roots):
        raise WireError("bad-succession", "the successions lead back to a root that was given up")
    for each in line:
        key = signature.public_key(each.old)
        signature.verify(key, Purpose.SUCCESSION, each.old + each.new, each.signed)
    return line


def extend_line(line: Sequence[Succession], newest: Succession) -> tuple[Succession, ...]:
    """The line with one more; the oldest is left out where there would be too many."""
    return (*line, newest)[-MOST_SUCCESSIONS:]


def _parse(data: bytes) -> Succession:
    return Succession(
        data[:PUBLIC_KEY_BYTES], data[PUBLIC_KEY_BYTES:_SUCCESSION_BYTES], data[_SUCCESSION_BYTES:]
    )


# The delegation: what the root lets an online key, the delegate, sign in its place, and how
# long.
#
# Bytes: ``root 32 | delegate 32 | first serial 8 | last serial 8 | expires 8 | signature 64``,
# the signature by the root over the 88 bytes before it. The serials of two delegations never
# overlap: who has seen a descriptor of the later one, or holds a code made under it, accepts
# nothing that the earlier delegate ever signs.

SERIAL_LIMIT = 2**40 - 1  # what an enrolment code has room for
Serial = Annotated[int, Within(1, SERIAL_LIMIT)]
_NUMBERS = struct.Struct("<QQQ")
_DELEGATION_BYTES = 2 * PUBLIC_KEY_BYTES + _NUMBERS.size
DELEGATION_BYTES = _DELEGATION_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True)
class Delegation(Declared):
    """A delegation as the root signed it."""

    root: PublicKey
    delegate: PublicKey
    first_serial: Serial
    last_serial: Serial
    expires_unix_seconds: Annotated[int, Within(1, 2**63 - 1)]
    """No descriptor of the delegate may hold for longer."""
    signed: bytes
    """64 bytes."""

    def check(self) -> None:
        if self.first_serial > self.last_serial:
            raise ValueError("a delegation's serials must rise")

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
    signed = data[_DELEGATION_BYTES:]
    key = signature.public_key(root)
    signature.verify(key, Purpose.DELEGATION, data[:_DELEGATION_BYTES], signed)
    delegate = data[PUBLIC_KEY_BYTES : 2 * PUBLIC_KEY_BYTES]
    signature.public_key(delegate)
    first, last, expires = _NUMBERS.unpack_from(data, 2 * PUBLIC_KEY_BYTES)
    try:
        return Delegation(root, delegate, first, last, expires, signed)
    except ValueError as error:
        raise WireError("bad-delegation", str(error)) from error
