"""The descriptor: which keys the aggregator uses now, and on whose word.

Bytes: ``version 1 | type 1 | number of successions 1 | successions 128 each | delegation 152 |
signature 64 | body``, the body a :class:`DescriptorBody`. The signature is the delegate's and
covers everything between the first two bytes and itself, and the body. So one message leads from a
root that was trusted some rotations ago to the keys of today.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.fields import Declared, Key, Length, Within
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
from device_sdk.wire.seal.keys import fingerprint
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


MAX_BYTES = 4096
_LINE_AT = 3
_LEAST_BYTES = _LINE_AT + DELEGATION_BYTES + signature.SIGNATURE_BYTES + 1


@dataclass(frozen=True)
class DescriptorBody(Record):
    """What a delegate signs: the keys that serve, and how long."""

    serial: Serial
    issued_unix_seconds: Annotated[Count, Key("issued")]
    """The time by which devices that knew an older descriptor go from now on: no time that was
    signed under one before counts any more, so that they recover from clocks that were ahead."""
    expires_unix_seconds: Annotated[Count, Key("expires")]
    """Later than ``issued``."""
    signing: PublicKey
    """Ed25519: of the aggregator's online signing key, for what it says to all, and to who
    enrols."""
    sessions: PublicKey
    """Ed25519: signs the replies to opens, and denials, and nothing else. The processes that hold
    sessions need no other one."""
    hpke: Annotated[bytes, Length(hpke.PUBLIC_KEY_BYTES)]
    """The aggregator's HPKE public key."""

    MOST_BYTES = MAX_BYTES

    def check(self) -> None:
        if self.issued_unix_seconds >= self.expires_unix_seconds:
            raise ValueError("issued at the time of its expiry, or after it")


@dataclass(frozen=True)
class Descriptor(DescriptorBody):
    """A descriptor whose signatures were all found right."""

    successions: tuple[Succession, ...]
    """How the root came to its place, oldest first; none for a fleet's first root."""
    delegation: Delegation
    digest: bytes
    """SHA-256 of the whole message."""
    message: bytes
    """The message itself, to be kept or published."""

    @property
    def root(self) -> bytes:
        """Public key of the root in force, 32 bytes."""
        return self.delegation.root

    @property
    def root_fingerprint(self) -> bytes:
        """Of the root in force, 16 bytes."""
        return fingerprint(self.root)

    def follows_from(self, root_fingerprint: bytes) -> bool:
        """Whether who trusts this root has reason to trust this descriptor."""
        roots = [each.old for each in self.successions] + [self.root]
        return root_fingerprint in map(fingerprint, roots)

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

    root: bytes
    serial: int
    digest: bytes


def make_descriptor(
    delegate: Ed25519PrivateKey,
    delegation: Delegation,
    serial: int,
    issued_unix_seconds: int,
    expires_unix_seconds: int,
    signing: bytes,
    sessions: bytes,
    hpke_public: bytes,
    successions: Sequence[Succession] = (),
) -> Descriptor:
    """Sign a new descriptor with the delegate's key.

    Raises ``ValueError`` for values out of range, and for what the delegation does not allow.
    """
    body = encode(
        DescriptorBody(
            serial, issued_unix_seconds, expires_unix_seconds, signing, sessions, hpke_public
        )
    )
    if signing == sessions:
        raise ValueError("one key for all signs and for sessions: who holds sessions had it, too")
    line = b"".join(each.to_bytes() for each in successions)
    head = bytes([len(successions)]) + line + delegation.to_bytes()
    signed = signature.sign(delegate, Purpose.DESCRIPTOR, head + body)
    message = prefix(MessageType.DESCRIPTOR) + head + signed + body
    try:
        return read_descriptor(message, fingerprint(delegation.root))
    except WireError as error:
        raise ValueError(f"the descriptor cannot be made: {error}") from error


def read_descriptor(
    message: bytes,
    root_fingerprint: bytes,
    seen: DescriptorSeen | None = None,
    least_serial: int = 0,
) -> Descriptor:
    """Verify a descriptor message from a root's fingerprint (16 bytes) on.

    The root may be the one in force or one that its successions begin with or pass. Serials are a
    root's own: under a successor of the root that ``seen`` names, any of at least ``least_serial``
    is newer. Expiry is not judged here: the message does not tell the time.

    Raises ``WireError``: ``wrong-root``, ``bad-succession``, ``bad-delegation`` (what the root's
    delegation does not allow, too), ``bad-signature``, ``bad-key``, ``serial-fell`` (below the one
    seen, or ``least_serial``), ``serial-reused`` (the serial seen, other content), or what the
    parsers raise.
    """
    check_prefix(message, MessageType.DESCRIPTOR, _LEAST_BYTES, MAX_BYTES)
    if message[2] > MOST_SUCCESSIONS:
        raise WireError(
            "bad-succession", f"{message[2]} successions, at most {MOST_SUCCESSIONS} expected"
        )
    delegation_at = _LINE_AT + message[2] * SUCCESSION_BYTES
    signed_at = delegation_at + DELEGATION_BYTES
    body_at = signed_at + signature.SIGNATURE_BYTES
    if len(message) <= body_at:
        raise WireError("truncated", "no room for a body behind the successions")
    # Before any signature: a stranger's descriptor costs a few hashes.
    roots = [
        message[place : place + signature.PUBLIC_KEY_BYTES]
        for place in range(_LINE_AT, delegation_at + 1, SUCCESSION_BYTES)
    ]
    if root_fingerprint not in map(fingerprint, roots):
        raise WireError("wrong-root", "it follows from another root than the trusted one")
    delegation = read_delegation(message[delegation_at:signed_at])
    successions = read_line(message[_LINE_AT:delegation_at], delegation.root)
    body = message[body_at:]
    signature.verify(
        signature.public_key(delegation.delegate),
        Purpose.DESCRIPTOR,
        message[2:signed_at] + body,
        message[signed_at:body_at],
    )
    descriptor = Descriptor(
        **vars(decode(DescriptorBody, body)),
        successions=successions,
        delegation=delegation,
        digest=hashlib.sha256(message).digest(),
        message=message,
    )
    signature.public_key(descriptor.signing)
    signature.public_key(descriptor.sessions)
    hpke.public_key(descriptor.hpke)
    if not delegation.allows(descriptor.serial, descriptor.expires_unix_seconds):
        raise WireError("bad-delegation", "a serial or an expiry that the root did not allow")
    if descriptor.serial < least_serial:
        raise WireError("serial-fell", f"serial {descriptor.serial} is below {least_serial}")
    if seen is not None and seen.root == descriptor.root:
        _require_newer(descriptor, seen)
    return descriptor


def root_of(message: bytes) -> bytes:
    """Fingerprint of the root that a descriptor message names as in force. Proves nothing."""
    check_prefix(message, MessageType.DESCRIPTOR, _LEAST_BYTES, MAX_BYTES)
    delegation_at = _LINE_AT + message[2] * SUCCESSION_BYTES
    return fingerprint(message[delegation_at : delegation_at + signature.PUBLIC_KEY_BYTES])


def _require_newer(descriptor: Descriptor, seen: DescriptorSeen) -> None:
    if descriptor.serial < seen.serial:
        raise WireError(
            "serial-fell", f"serial {descriptor.serial} is below {seen.serial}, seen before"
        )
    if descriptor.serial == seen.serial and descriptor.digest != seen.digest:
        raise WireError(
            "serial-reused", f"serial {descriptor.serial} was seen before with other content"
        )
