"""Presence: the aggregator's signed word on which of its lives this is.

Bytes: ``version 1 | type 1 | signature 64 | body``, the body canonical CBOR of {incarnation,
started}; signed by the signing key of the descriptor in force, over SHA-256(descriptor) || body.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.message import MessageType, Record, check_prefix, prefix
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.freshness import INCARNATION_BYTES
from device_sdk.wire.seal.keys import RandomBytes, draw
from device_sdk.wire.seal.signature import Purpose

MAX_BYTES = 256
_BODY_AT = 2 + signature.SIGNATURE_BYTES
_TIME_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class Presence:
    """One life of the aggregator's process."""

    incarnation: bytes
    """16 random bytes, drawn when the process starts."""
    started_unix_seconds: int

    def __post_init__(self) -> None:
        if len(self.incarnation) != INCARNATION_BYTES:
            raise ValueError(f"an incarnation has {INCARNATION_BYTES} bytes")
        if not 0 <= self.started_unix_seconds <= _TIME_LIMIT:
            raise ValueError("the start must be a Unix time in seconds")


def new_presence(started_unix_seconds: int, random_bytes: RandomBytes = os.urandom) -> Presence:
    """The presence of a process that starts now."""
    return Presence(draw(random_bytes, INCARNATION_BYTES), started_unix_seconds)


def sign_presence(presence: Presence, descriptor: Descriptor, signing: Ed25519PrivateKey) -> bytes:
    """The retained message. Published anew after a rotation: it names the descriptor in force."""
    body = cbor.encode(
        {"incarnation": presence.incarnation, "started": presence.started_unix_seconds}
    )
    signed = signature.sign(signing, Purpose.PRESENCE, descriptor.digest + body)
    return prefix(MessageType.PRESENCE) + signed + body


def read_presence(message: bytes, descriptor: Descriptor) -> Presence:
    """Verify a presence message. Raises ``WireError``: ``bad-signature``, or a parser's reason."""
    check_prefix(message, MessageType.PRESENCE, _BODY_AT + 1, MAX_BYTES)
    body = message[_BODY_AT:]
    key = signature.public_key(descriptor.signing)
    signature.verify(key, Purpose.PRESENCE, descriptor.digest + body, message[2:_BODY_AT])
    record = Record(cbor.decode(body, limit_bytes=MAX_BYTES), ("incarnation", "started"))
    return Presence(
        record.octets("incarnation", INCARNATION_BYTES),
        record.unsigned("started", _TIME_LIMIT),
    )


class PresenceWatch:
    """Decides which life of the aggregator to ask, and whether a presence calls for a new session.

    The broker keeps old presences and may show them again. One that started before the newest seen
    calls for nothing, and one for which a session was opened already asks for no second one: a
    broker can cause one needless session for each presence the aggregator ever signed, and no loop.
    """

    _MOST_ASKED = 64

    def __init__(self) -> None:
        self.session: bytes | None = None
        """The life that answered last: no broker can show another in its place."""
        self._newest: Presence | None = None
        self._shown: Presence | None = None
        self._asked: set[bytes] = set()

    def session_opened(self, incarnation: bytes) -> None:
        """Note the incarnation that a session's reply gave."""
        self.session = incarnation

    def elsewhere(self) -> None:
        """The device goes to another broker: what was shown at the one before tells nothing of who
        is there."""
        self._newest = self._shown = None
        self._asked.clear()

    def incarnation(self, unanswered: int) -> bytes | None:
        """The life to ask, after so many attempts in a row without an answer; None for none known.

        By turns the newest, and the one shown last: the first alone would shut the device out where
        the aggregator was restored from a backup that does not know of its last lives, the second
        while somebody shows an old presence.
        """
        presence = self._shown if unanswered % 2 else self._newest
        return None if presence is None else presence.incarnation

    def may_deny(self, incarnation: bytes) -> bool:
        """Whether a life's word counts that a session is not open there: of the one that answered
        last, and of the newest. So not of one that was thought to have ended."""
        newest = None if self._newest is None else self._newest.incarnation
        return incarnation in (self.session, newest)

    def should_reopen(self, presence: Presence) -> bool:
        """Whether to open a new session (after a random wait) because of this presence."""
        self._shown = presence
        newest = self._newest
        if newest is not None and presence.started_unix_seconds < newest.started_unix_seconds:
            return False
        if newest is None or presence.started_unix_seconds > newest.started_unix_seconds:
            self._asked.clear()
        self._newest = presence
        if presence.incarnation == self.session or presence.incarnation in self._asked:
            return False
        if len(self._asked) >= self._MOST_ASKED:
            return False
        self._asked.add(presence.incarnation)
        return True
