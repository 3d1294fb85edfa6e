"""The aggregator's end of sessions: one live session for each device, and those about to be."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from device_sdk.wire import hpke
from device_sdk.wire.admission import Clock, TokenBuckets
from device_sdk.wire.envelope import SESSION_ID_BYTES, Fragment, read_header
from device_sdk.wire.errors import WireError
from device_sdk.wire.group_key import GroupKey
from device_sdk.wire.handshake import SessionReply, admit_open, decode_open, encode_reply
from device_sdk.wire.keyring import Keyring
from device_sdk.wire.keys import RandomBytes, draw
from device_sdk.wire.session import SECRET_BYTES, End, Received, Session, derive_session_keys

PENDING_SECONDS = 300.0
MOST_PENDING = 4
_REMEMBERED_OPENS = 64


@dataclass(frozen=True)
class RegisteredDevice:
    """What the registry says of a device that is not revoked."""

    device_id: bytes
    identity: bytes
    """Ed25519 public key, 32 bytes."""
    admission_key: bytes


@dataclass(frozen=True, slots=True)
class _Pending:
    session: Session
    open_digest: bytes
    reply: bytes
    granted_at_seconds: float


@dataclass(slots=True)
class _Seat:
    """A device's place in the table."""

    live: Session | None = None
    pending: list[_Pending] = field(default_factory=list)  # oldest first
    opens: deque[bytes] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_OPENS))


class SessionTable:
    """Sessions of all devices, in memory only. Not for several threads at once.

    A granted session waits beside the live one and replaces it at its first valid envelope, so a
    replayed open, whose keys the replayer does not have, evicts nobody.

    ``clock`` gives monotonic seconds, ``unix_clock`` Unix time in seconds. ``buckets`` bounds the
    opens of each device that cost public-key work. A reply goes out under the keys of the
    descriptor that the open named.
    """

    def __init__(
        self,
        keyring: Keyring,
        incarnation: bytes,
        buckets: TokenBuckets,
        clock: Clock,
        unix_clock: Callable[[], float],
        *,
        random_bytes: RandomBytes = os.urandom,
        seal: hpke.Seal = hpke.seal,
        unseal: hpke.Unseal = hpke.unseal,
    ) -> None:
        self._keyring = keyring
        self._incarnation = incarnation
        self._buckets = buckets
        self._clock = clock
        self._unix_clock = unix_clock
        self._random_bytes = random_bytes
        self._seal = seal
        self._unseal = unseal
        self._seats: dict[bytes, _Seat] = {}
        self._owners: dict[bytes, bytes] = {}  # session id -> device id, live and pending

    def replace_keyring(self, keyring: Keyring) -> None:
        """Use other keys for opens from now on. Sessions that are open stay open."""
        self._keyring = keyring

    def accept_open(
        self, device: RegisteredDevice, message: bytes, group_keys: tuple[GroupKey, ...]
    ) -> bytes:
        """The reply to an open that came on ``device``'s topic.

        Cheapest checks first: form, admission tag, repetition, token bucket, and only then
        unsealing and the signature. The same bytes again get the same reply while the session
        waits for its first envelope.

        Raises ``WireError``: ``bad-admission``, ``unknown-descriptor``, ``retired-descriptor``,
        ``replayed``, ``too-many``, ``cannot-unseal``, ``wrong-device``, ``bad-signature``,
        ``bad-key``, or a parser's reason.
        """
        now_unix_seconds = int(self._unix_clock())
        serving = admit_open(message, device.admission_key, self._keyring, now_unix_seconds)
        digest = hashlib.sha256(message).digest()
        seat = self._seats.get(device.device_id, _Seat())
        self._drop_stale(seat)
        for pending in seat.pending:
            if pending.open_digest == digest:
                return pending.reply
        if digest[:16] in seat.opens:
            raise WireError("replayed", "this open came before")
        self._buckets.take(device.device_id)
        request = decode_open(message, device.device_id, device.identity, serving, self._unseal)
        reply = SessionReply(
            self._new_session_id(),
            draw(self._random_bytes, SECRET_BYTES),
            self._incarnation,
            now_unix_seconds,
            group_keys,
        )
        reply_message = encode_reply(reply, digest, request.ephemeral, serving.signing, self._seal)
        keys = derive_session_keys(request.secret, reply.secret, message, reply_message)
        session = Session(reply.session_id, keys, End.AGGREGATOR, self._clock)
        self._seats[device.device_id] = seat
        self._wait(device.device_id, seat, _Pending(session, digest, reply_message, self._clock()))
        return reply_message

    def receive(self, message: bytes, topic_device_id: bytes) -> Received:
        """The content of an envelope that came on the topic of ``topic_device_id``.

        Raises ``WireError``: ``unknown-session``, ``wrong-topic`` (the session belongs to another
        device), or what :meth:`Session.open` raises.
        """
        header = read_header(message)
        owner = self._owners.get(header.session_id)
        if owner is None:
            raise WireError("unknown-session", "no session with this id is open here")
        if owner != topic_device_id:
            raise WireError("wrong-topic", "the session belongs to another device's topic")
        seat = self._seats[owner]
        if seat.live is not None and seat.live.session_id == header.session_id:
            return seat.live.open_parsed(message, header)
        for place, pending in enumerate(seat.pending):
            if pending.session.session_id == header.session_id:
                received = pending.session.open_parsed(message, header)
                self._promote(seat, place)
                return received
        raise AssertionError("the table of owners names a session that its device does not have")

    def seal(
        self,
        device_id: bytes,
        message_type: int,
        payload: bytes,
        fragment: Fragment | None = None,
    ) -> bytes:
        """An envelope under the device's live session. Raises ``WireError("no-session")``."""
        seat = self._seats.get(device_id)
        if seat is None or seat.live is None:
            raise WireError("no-session", "the device has no live session")
        return seat.live.seal(message_type, payload, fragment)

    def has_session(self, device_id: bytes) -> bool:
        """Whether the device has a live session that can still be sent under."""
        seat = self._seats.get(device_id)
        return seat is not None and seat.live is not None and not seat.live.is_spent()

    def end(self, device_id: bytes) -> None:
        """End all sessions of a device at once (it was revoked)."""
        seat = self._seats.pop(device_id, None)
        if seat is not None:
            self._forget(seat.live)
            for pending in seat.pending:
                self._forget(pending.session)

    def sweep(self) -> None:
        """Forget sessions that ended or were never used. To be called now and then."""
        for device_id in list(self._seats):
            seat = self._seats[device_id]
            self._drop_stale(seat)
            if seat.live is not None and seat.live.is_expired():
                self._forget(seat.live)
                seat.live = None
            if seat.live is None and not seat.pending:
                del self._seats[device_id]

    def __len__(self) -> int:
        """Live and waiting sessions."""
        return len(self._owners)

    def _new_session_id(self) -> bytes:
        while True:
            session_id = draw(self._random_bytes, SESSION_ID_BYTES)
            if session_id not in self._owners:
                return session_id

    def _wait(self, device_id: bytes, seat: _Seat, pending: _Pending) -> None:
        seat.pending.append(pending)
        seat.opens.append(pending.open_digest[:16])
        self._owners[pending.session.session_id] = device_id
        while len(seat.pending) > MOST_PENDING:
            self._forget(seat.pending.pop(0).session)

    def _promote(self, seat: _Seat, place: int) -> None:
        self._forget(seat.live)
        for older in seat.pending[:place]:
            self._forget(older.session)
        seat.live = seat.pending[place].session
        del seat.pending[: place + 1]

    def _drop_stale(self, seat: _Seat) -> None:
        stale_before_seconds = self._clock() - PENDING_SECONDS
        while seat.pending and seat.pending[0].granted_at_seconds <= stale_before_seconds:
            self._forget(seat.pending.pop(0).session)

    def _forget(self, session: Session | None) -> None:
        if session is not None:
            del self._owners[session.session_id]
