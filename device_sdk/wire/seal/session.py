"""One session: what both ends hold once open and reply have been exchanged.

Everything here lives in memory only. Nothing of it may be written down: a counter that came back
from a file after a crash would use a nonce twice.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.admission import Clock
from device_sdk.wire.seal.envelope import (
    SESSION_ID_BYTES,
    Direction,
    DirectionKeys,
    EnvelopeCipher,
    Fragment,
    Header,
    read_header,
)

# The window that refuses a sequence number seen before.

WINDOW = 1024


class ReplayWindow:
    """Remembers which of the last 1,024 sequence numbers came (RFC 6479's idea, one big integer).

    Bit i of the mask stands for ``highest - i``. Ask only after the tag was found right: else a
    forged message with a huge number would push every honest one out of the window.
    """

    def __init__(self) -> None:
        self._highest = -1
        self._mask = 0

    def accept(self, sequence: int) -> None:
        """Mark ``sequence`` (0 or above) as seen.

        Raises ``WireError``: ``replayed`` when it was seen before, ``too-old`` when it lies 1,024
        or more below the highest seen, so that nobody can tell.
        """
        age = self._highest - sequence
        if age < 0:
            # A mask that was far left behind holds nothing: shifting it by the gap would first
            # build an integer as wide as the gap.
            self._mask = 1 if -age >= WINDOW else (self._mask << -age | 1) & (1 << WINDOW) - 1
            self._highest = sequence
        elif age >= WINDOW:
            raise WireError("too-old", f"sequence number {age} below the highest seen")
        elif self._mask >> age & 1:
            raise WireError("replayed", "this sequence number came before")
        else:
            self._mask |= 1 << age


SECRET_BYTES = 32
MAX_LIFETIME_SECONDS = 24 * 3600.0
MAX_MESSAGES = 2**20

_LABELS = {
    Direction.UP: b"tessera/1 device to aggregator",
    Direction.DOWN: b"tessera/1 aggregator to device",
}


class End(Enum):
    """Which end of a session a process is; the value is the direction in which it sends."""

    DEVICE = Direction.UP
    AGGREGATOR = Direction.DOWN


@dataclass(frozen=True)
class SessionKeys:
    """Keys and IVs of both directions."""

    up: DirectionKeys
    down: DirectionKeys

    def of(self, direction: Direction) -> DirectionKeys:
        """The keys of one direction."""
        return self.up if direction is Direction.UP else self.down


def derive_session_keys(
    device_secret: bytes, aggregator_secret: bytes, open_message: bytes, reply_message: bytes
) -> SessionKeys:
    """HKDF-SHA256(s_d || s_a, salt = SHA-256(open || reply), label): 44 bytes a direction.

    ``open_message`` and ``reply_message`` are the whole messages as they travelled.
    """
    if len(device_secret) != SECRET_BYTES or len(aggregator_secret) != SECRET_BYTES:
        raise ValueError(f"each end's secret has {SECRET_BYTES} bytes")
    salt = hashlib.sha256(open_message + reply_message).digest()

    # HKDF-Extract (RFC 5869, section 2.2) does not depend on the label: it is done once for both.
    extracted = hmac.digest(salt, device_secret + aggregator_secret, "sha256")

    def expand(direction: Direction) -> DirectionKeys:
        kdf = HKDFExpand(algorithm=SHA256(), length=44, info=_LABELS[direction])
        material = kdf.derive(extracted)
        return DirectionKeys(material[:32], material[32:])

    return SessionKeys(expand(Direction.UP), expand(Direction.DOWN))


class Received(NamedTuple):
    """The content of an envelope that was opened."""

    message_type: int
    payload: bytes
    fragment: Fragment | None
    sequence: int


class Session:
    """Seals what this end sends and opens what the other sends. Not for several threads at once.

    ``clock`` gives monotonic seconds; where the machine may sleep, one that counts the sleep.
    Both ends refuse to go on after 24 hours or 2^20 messages in a direction.
    """

    def __init__(self, session_id: bytes, keys: SessionKeys, end: End, clock: Clock) -> None:
        if len(session_id) != SESSION_ID_BYTES:
            raise ValueError(f"a session id has {SESSION_ID_BYTES} bytes")
        sending: Direction = end.value
        receiving = Direction.DOWN if sending is Direction.UP else Direction.UP
        self.session_id = session_id
        self._sealing = EnvelopeCipher(keys.of(sending), sending)
        self._opening = EnvelopeCipher(keys.of(receiving), receiving)
        self._clock = clock
        self._ends_at_seconds = clock() + MAX_LIFETIME_SECONDS
        self._next_sequence = 0
        self._window = ReplayWindow()

    def is_spent(self) -> bool:
        """Whether this end can send no more: too old, or too many messages sent."""
        return self.is_expired() or self._next_sequence >= MAX_MESSAGES

    def seal(self, message_type: int, payload: bytes, fragment: Fragment | None = None) -> bytes:
        """The next envelope. ``message_type`` is 16 to 255.

        Raises ``WireError``: ``session-expired``, ``session-exhausted`` (open a new session), and
        ``ValueError`` for a payload above ``envelope.MAX_PAYLOAD_BYTES``.
        """
        self._require_alive()
        if self._next_sequence >= MAX_MESSAGES:
            raise WireError("session-exhausted", f"{MAX_MESSAGES} messages were sent")
        sequence = self._next_sequence
        # Counted before sealing: whatever happens below, the number is not used again.
        self._next_sequence += 1
        return self._sealing.seal(message_type, self.session_id, sequence, payload, fragment)

    def open(self, message: bytes) -> Received:
        """The content of an envelope of the other end.

        Raises ``WireError``: ``wrong-session``, ``session-expired``, ``session-exhausted``,
        ``bad-tag``, ``bad-padding``, ``replayed``, ``too-old``, or what the header's parser raises.
        A refused message changes nothing.
        """
        return self.open_parsed(message, read_header(message))

    def open_parsed(self, message: bytes, header: Header) -> Received:
        """:meth:`open` for a caller that has read the header to find the session."""
        if header.session_id != self.session_id:
            raise WireError("wrong-session", "the envelope belongs to another session")
        self._require_alive()
        if header.sequence >= MAX_MESSAGES:
            raise WireError("session-exhausted", f"sequence number above {MAX_MESSAGES - 1}")
        payload = self._opening.open(message, header)
        self._window.accept(header.sequence)
        return Received(header.message_type, payload, header.fragment, header.sequence)

    def is_expired(self) -> bool:
        """Whether the session is older than 24 hours: no end seals or opens any more."""
        return self._clock() >= self._ends_at_seconds

    def _require_alive(self) -> None:
        if self.is_expired():
            raise WireError("session-expired", "the session is older than 24 hours")
