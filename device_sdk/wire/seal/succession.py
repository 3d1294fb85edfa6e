"""Successions: how one root key hands over to the next.

Bytes of one: ``old root 32 | new root 32 | signature 64``, the signature by the old root over the
64 bytes before it. A line of successions is their bytes, oldest first; at most
:data:`MOST_SUCCESSIONS`, so that who slept through more has to be told the root by an enrolment
code. Neither number nor time is in it: each new root is a fresh key, so the keys alone make the
order, and no succession is ever withdrawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.signature import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Purpose

MOST_SUCCESSIONS = 8
_SIGNED_BYTES = 2 * PUBLIC_KEY_BYTES
SUCCESSION_BYTES = _SIGNED_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True)
class Succession:
    """One root's word that another takes its place."""

    old: bytes
    """Public key of the root that signed, 32 bytes."""
    new: bytes
    """Public key of its successor, 32 bytes."""
    signed: bytes
    """64 bytes."""

    def to_bytes(self) -> bytes:
        """128 bytes."""
        return self.old + self.new + self.signed


def make_succession(old: Ed25519PrivateKey, new: bytes) -> Succession:
    """Hand over from ``old`` to the root with the public key ``new``. Raises ``ValueError``."""
    if len(new) != PUBLIC_KEY_BYTES:
        raise ValueError(f"expected a public key of {PUBLIC_KEY_BYTES} bytes, got {len(new)}")
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
        data[:PUBLIC_KEY_BYTES], data[PUBLIC_KEY_BYTES:_SIGNED_BYTES], data[_SIGNED_BYTES:]
    )
