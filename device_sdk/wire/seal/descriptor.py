"""The descriptor: which keys the aggregator uses now, and on whose word.

Bytes: ``version 1 | type 1 | number of successions 1 | successions 128 each | delegation 152 |
signature 64 | body``, the body a :class:`DescriptorBody`. The signature is the delegate's and
covers everything between the first two bytes and itself, and the body. So one message leads from a
root that was trusted some rotations ago to the keys of today.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.fields import Key, Length
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
from device_sdk.wire.seal.authority import (
    DELEGATION_BYTES,
    MOST_SUCCESSIONS,
    SUCCESSION_BYTES,
    Delegation,
    Serial,
    Succession,
    read_delegation,
    read_line,
)
from device_sdk.wire.seal.keys import fingerprint
from device_sdk.wire.seal.signature import PublicKey, Purpose

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
