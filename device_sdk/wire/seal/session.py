"""One session: what both ends hold once open and reply were exchanged, and its sealed messages.

An envelope, little-endian: ``version 1 | type 1 | flags 2 | session id 8 | sequence 8 |
[fragment 20] | ciphertext | tag 16``. The fragment header stands there when flag bit 0 is set.
ChaCha20-Poly1305; associated data = everything before the ciphertext || direction (1 byte);
nonce = IV xor sequence.

Everything here lives in memory only. Nothing of it may be written down: a counter that came back
from a file after a crash would use a nonce twice.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Annotated, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from device_sdk.fields import Declared, Length, Within
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import FIRST_ENVELOPE_TYPE, VERSION
from device_sdk.wire.seal.admission import Clock

# Padding of plaintexts to size buckets: eight to each doubling.
#
# A ciphertext's length tells the broker how much a device touched. Rounded up, it tells one of
# eight sizes an octave, for at most an eighth more bytes (and at least 128).

LEAST_BYTES = 128


def padded_length(length: int, most: int) -> int:
    """Bytes that a plaintext of ``length`` takes once padded; at most ``most``.

    Raises ``ValueError`` when ``length`` and the one mark byte do not fit into ``most``.
    """
    needed = length + 1
    if needed > most:
        raise ValueError(f"{length} bytes do not fit into {most} with their padding")
    step = 1 << max(0, needed.bit_length() - 4)
    return min(most, max(LEAST_BYTES, -(-needed // step) * step))


def pad(plaintext: bytes, most: int) -> bytes:
    """``plaintext`` || 0x80 || zeros (ISO/IEC 7816-4), :func:`padded_length` bytes long."""
    total = padded_length(len(plaintext), most)
    return plaintext + b"\x80" + bytes(total - len(plaintext) - 1)


def unpad(padded: bytes, most: int) -> bytes:
    """What :func:`pad` was given. Raises ``WireError("bad-padding")``.

    Padding to another length than the rule's is refused too: it would be a way to mark messages.
    """
    end = len(padded.rstrip(b"\x00")) - 1
    if end < 0 or padded[end] != 0x80:
        raise WireError("bad-padding", "the padding's mark is missing")
    if len(padded) > most or len(padded) != padded_length(end, most):
        raise WireError("bad-padding", "padded to a length that is not the bucket's")
    return padded[:end]


SESSION_ID_BYTES = 8
MAX_MESSAGE_BYTES = 96 * 1024
TAG_BYTES = 16
FLAG_FRAGMENT = 1

_HEADER = struct.Struct("<BBH8sQ")
_FRAGMENT = struct.Struct("<8sIII")
HEADER_BYTES = _HEADER.size
FRAGMENT_BYTES = _FRAGMENT.size
_MAX_PADDED = MAX_MESSAGE_BYTES - HEADER_BYTES - FRAGMENT_BYTES - TAG_BYTES
MAX_PAYLOAD_BYTES = _MAX_PADDED - 1
"""The most one envelope carries: 98,247 bytes. More goes in fragments."""


def payload_within(message_bytes: int) -> int:
    """The most that one envelope of at most so many bytes carries, as a fragment; 0 or less where
    none is so small."""
    room = min(_MAX_PADDED, message_bytes - HEADER_BYTES - FRAGMENT_BYTES - TAG_BYTES)
    if room < _MAX_PADDED:
        room -= room % (1 << max(0, room.bit_length() - 4)) if room >= LEAST_BYTES else room
    return room - 1


class Direction(IntEnum):
    """Which way an envelope travels: bound by the associated data, and keyed apart."""

    UP = 1
    DOWN = 2


@dataclass(frozen=True)
class Fragment(Declared):
    """Which part of a longer message an envelope carries: ``index`` of ``total`` parts."""

    message_id: Annotated[bytes, Length(8)]
    index: Annotated[int, Within(0)]
    total: Annotated[int, Within(1, 2**32 - 1)]
    length: Annotated[int, Within(1, 2**32 - 1)]
    """Bytes of the whole message."""

    def check(self) -> None:
        if self.index >= self.total:
            raise ValueError(f"fragment {self.index} of {self.total} does not exist")


class Header(NamedTuple):
    """What stands in clear before the ciphertext. Nothing in it is proven before the tag is."""

    message_type: int
    session_id: bytes
    sequence: int
    fragment: Fragment | None
    length: int
    """Bytes before the ciphertext."""


@dataclass(frozen=True)
class DirectionKeys:
    """Key (32 bytes) and IV (12 bytes) of one direction of one session."""

    key: bytes
    iv: bytes

    def __post_init__(self) -> None:
        if len(self.key) != 32 or len(self.iv) != 12:
            raise ValueError("a direction has a key of 32 bytes and an IV of 12")

    def __repr__(self) -> str:
        return "DirectionKeys(...)"  # keys must not reach a log through a traceback


class EnvelopeCipher:
    """Seals and opens the envelopes of one direction. Knows nothing of what was used before."""

    def __init__(self, keys: DirectionKeys, direction: Direction) -> None:
        # A cipher object holds 2 KB; built when needed it costs 3 us. An aggregator keeps two
        # directions for each of many thousand devices, most of them silent.
        self._key = keys.key
        self._iv = int.from_bytes(keys.iv, "little")
        self._direction = bytes((direction,))

    def nonce(self, sequence: int) -> bytes:
        """12 bytes: the IV with the sequence, little-endian, xored into its first eight bytes."""
        return (self._iv ^ sequence).to_bytes(12, "little")

    def seal(
        self,
        message_type: int,
        session_id: bytes,
        sequence: int,
        payload: bytes,
        fragment: Fragment | None = None,
    ) -> bytes:
        """The envelope of ``payload``, padded to its size bucket.

        Raises ``ValueError`` for a payload above ``MAX_PAYLOAD_BYTES`` or a type outside 16..255.
        """
        if not FIRST_ENVELOPE_TYPE <= message_type <= 255:
            raise ValueError(f"type {message_type}: types inside a session are 16 to 255")
        flags = 0 if fragment is None else FLAG_FRAGMENT
        head = _HEADER.pack(VERSION, message_type, flags, session_id, sequence)
        if fragment is not None:
            head += _FRAGMENT.pack(
                fragment.message_id, fragment.index, fragment.total, fragment.length
            )
        padded = pad(payload, _MAX_PADDED)
        cipher = ChaCha20Poly1305(self._key)
        return head + cipher.encrypt(self.nonce(sequence), padded, head + self._direction)

    def open(self, message: bytes, header: Header) -> bytes:
        """The payload. Raises ``WireError``: ``bad-tag``, ``bad-padding``."""
        head = message[: header.length]
        try:
            padded = ChaCha20Poly1305(self._key).decrypt(
                self.nonce(header.sequence),
                message[header.length :],
                head + self._direction,
            )
        except InvalidTag as error:
            raise WireError("bad-tag", "not sealed under this session's keys") from error
        return unpad(padded, _MAX_PADDED)


def read_header(message: bytes) -> Header:
    """Parse the clear part of an envelope.

    Raises ``WireError``: ``truncated``, ``too-large``, ``bad-version``, ``bad-type``,
    ``bad-flags``, ``bad-fragment``.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise WireError("too-large", f"{len(message)} bytes, at most {MAX_MESSAGE_BYTES} allowed")
    if len(message) < HEADER_BYTES + TAG_BYTES:
        raise WireError("truncated", f"{len(message)} bytes are too few for an envelope")
    version, message_type, flags, session_id, sequence = _HEADER.unpack_from(message)
    if version != VERSION:
        raise WireError("bad-version", f"protocol version {version}, expected {VERSION}")
    if message_type < FIRST_ENVELOPE_TYPE:
        raise WireError("bad-type", f"type {message_type} does not travel inside a session")
    if flags & ~FLAG_FRAGMENT:
        raise WireError("bad-flags", f"flags {flags:#06x}: only bit 0 has a meaning")
    if not flags:
        return Header(message_type, session_id, sequence, None, HEADER_BYTES)
    length = HEADER_BYTES + FRAGMENT_BYTES
    if len(message) < length + TAG_BYTES:
        raise WireError("truncated", f"{len(message)} bytes are too few for a fragment")
    try:
        fragment = Fragment(*_FRAGMENT.unpack_from(message, HEADER_BYTES))
    except ValueError as error:
        raise WireError("bad-fragment", str(error)) from error
    return Header(message_type, session_id, sequence, fragment, length)


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
        ``ValueError`` for a payload above ``MAX_PAYLOAD_BYTES``.
        """
        sequence = self._next_sequence
        self._require_alive(sequence)
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
        self._require_alive(header.sequence)
        payload = self._opening.open(message, header)
        self._window.accept(header.sequence)
        return Received(header.message_type, payload, header.fragment, header.sequence)

    def is_expired(self) -> bool:
        """Whether the session is older than 24 hours: no end seals or opens any more."""
        return self._clock() >= self._ends_at_seconds

    def _require_alive(self, sequence: int) -> None:
        if self.is_expired():
            raise WireError("session-expired", "the session is older than 24 hours")
        if sequence >= MAX_MESSAGES:
            raise WireError("session-exhausted", f"sequence number above {MAX_MESSAGES - 1}")


class DeviceSessions:
    """The session a device sends under, and older ones the aggregator may still answer under.

    The aggregator takes a new session as the live one at its first valid envelope, which may be on
    its way or lost. So older sessions are kept for receiving until an envelope of a newer one came.
    """

    _MOST = 4

    def __init__(self) -> None:
        self._sessions: list[Session] = []  # oldest first; the last one is sent under

    def install(self, session: Session) -> None:
        """Send under ``session`` from now on."""
        self._sessions = [*self._sessions, session][-self._MOST :]

    @property
    def in_use(self) -> bytes | None:
        """Id of the session that is sent under; None for none."""
        return self._sessions[-1].session_id if self._sessions else None

    def needs_session(self) -> bool:
        """Whether there is none to send under, or only a spent one."""
        return not self._sessions or self._sessions[-1].is_spent()

    def seal(self, message_type: int, payload: bytes, fragment: Fragment | None = None) -> bytes:
        """An envelope under the newest session. Raises ``WireError("no-session")``."""
        if not self._sessions:
            raise WireError("no-session", "no session is open; open one first")
        return self._sessions[-1].seal(message_type, payload, fragment)

    def receive(self, message: bytes) -> Received:
        """The content of an envelope. Raises ``WireError``: ``unknown-session``, or a session's."""
        header = read_header(message)
        for place, session in enumerate(self._sessions):
            if session.session_id == header.session_id:
                received = session.open_parsed(message, header)
                del self._sessions[:place]
                return received
        raise WireError("unknown-session", "no session with this id is open here")

    def close(self) -> None:
        """Forget every session and its keys."""
        self._sessions.clear()
