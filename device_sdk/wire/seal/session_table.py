"""The aggregator's end of sessions: one live session for each device, and those about to be."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.admission import Clock, OpenSchedule, TokenBuckets, WorkBudget
from device_sdk.wire.seal.broadcast import GroupKey
from device_sdk.wire.seal.freshness import FreshnessMarks
from device_sdk.wire.seal.handshake import (
    SessionReply,
    check_open_tag,
    decode_open,
    encode_reply,
    read_open_head,
    sign_no_session,
)
from device_sdk.wire.seal.keyring import HandshakeKeys, Keyring
from device_sdk.wire.seal.keys import RandomBytes, draw
from device_sdk.wire.seal.session import (
    SECRET_BYTES,
    SESSION_ID_BYTES,
    End,
    Fragment,
    Received,
    Session,
    derive_session_keys,
    read_header,
)

PENDING_SECONDS = 300.0
_CLASH_SECONDS = 3600.0
_DENIALS_PER_SECOND = 0.5
_DENIALS_SHARE = 0.5
MOST_PENDING = 4
MOST_REPEATS = 8
"""Times that one open is answered again: more than a device sends it, and QoS 1 doubles that."""


@dataclass(frozen=True)
class RegisteredDevice:
    """What the registry says of a device that is not revoked."""

    device_id: bytes
    identity: bytes
    """Ed25519 public key, 32 bytes."""
    admission_key: bytes


@dataclass(slots=True)
class _Pending:
    session: Session
    open_digest: bytes
    reply: bytes
    granted_at_seconds: float
    repeats_left: int = MOST_REPEATS


@dataclass(slots=True)
class _Runs:
    """Which starts of a device opened sessions: the newest, and the one before it."""

    newest: bytes
    before: bytes = b""
    clashed_seconds: float = -math.inf

    def opened(self, run: bytes, now_seconds: float) -> bool:
        """A start opened a session; whether one did that another had followed: both are alive."""
        if run == self.newest:
            return False
        clash = run == self.before
        self.newest, self.before = run, self.newest
        if clash:
            self.clashed_seconds = now_seconds
        return clash


@dataclass(slots=True)
class _Seat:
    """A device's place in the table."""

    live: Session | None = None
    pending: list[_Pending] = field(default_factory=list)  # oldest first


class SessionTable:
    """Sessions of all devices, in memory only. Not for several threads at once.

    An open is granted once: it names this life of the aggregator and a counter above those of the
    device's opens that were granted before. A granted session waits beside the live one and
    replaces it at its first valid envelope, so a lost reply costs the device no session.

    A device draws a number at each start, which stands in its opens, sealed and signed. Counters
    rise, so an earlier start never follows a later one, unless two machines have one identity: then
    both are told so in their replies, for an hour, and :meth:`take_clashed` tells whoever serves.

    ``clock`` gives monotonic seconds, ``unix_clock`` Unix time in seconds. ``buckets`` bounds the
    opens of each device that cost public-key work, ``budget`` the work for all of them; half as
    much again may go into denials, so that these take nothing from who was told to come. A reply
    goes out under the keys of the descriptor that the open named. ``marks``: of a life that is not
    this process's alone.
    """

    def __init__(
        self,
        keyring: Keyring[HandshakeKeys],
        incarnation: bytes,
        buckets: TokenBuckets,
        budget: WorkBudget,
        clock: Clock,
        unix_clock: Callable[[], float],
        *,
        marks: FreshnessMarks | None = None,
        random_bytes: RandomBytes = os.urandom,
        seal: hpke.Seal = hpke.seal,
        unseal: hpke.Unseal = hpke.unseal,
    ) -> None:
        self._keyring = keyring
        self._incarnation = incarnation
        self._marks = FreshnessMarks(incarnation) if marks is None else marks
        self._buckets = buckets
        # Apart: whoever may write to a device's topic can ask for denials, and for no open.
        self._denials = TokenBuckets(1.0, _DENIALS_PER_SECOND, clock)
        self._budget = budget
        self._denials_budget = WorkBudget(_DENIALS_SHARE * budget.share, clock)
        self._schedule = OpenSchedule(budget.share, clock)
        self._clock = clock
        self._unix_clock = unix_clock
        self._random_bytes = random_bytes
        self._seal = seal
        self._unseal = unseal
        self._seats: dict[bytes, _Seat] = {}
        self._runs: dict[bytes, _Runs] = {}
        self._clashed: set[bytes] = set()
        self._owners: dict[bytes, bytes] = {}  # session id -> device id, live and pending

    def replace_keyring(self, keyring: Keyring[HandshakeKeys]) -> None:
        """Use other keys for opens from now on. Sessions that are open stay open."""
        self._keyring = keyring

    def accept_open(
        self, device: RegisteredDevice, message: bytes, group_keys: tuple[GroupKey, ...]
    ) -> bytes:
        """The reply to an open that came on ``device``'s topic.

        Cheapest checks first: form, incarnation, admission tag, counter, and only then budget and
        token bucket, unsealing and the signature. The same bytes again get the same reply a few
        times while the session waits for its first envelope.

        Raises ``WireError``: ``old-incarnation``, ``bad-admission``, ``replayed``,
        ``unknown-descriptor``, ``retired-descriptor``, ``busy``, ``too-many``, ``cannot-unseal``,
        ``wrong-device``, ``bad-signature``, ``bad-key``, or a parser's reason.
        """
        head = read_open_head(message)
        self._marks.require_this_life(head.freshness)
        check_open_tag(message, device.admission_key)
        seat = self._seats.get(device.device_id, _Seat())
        self._drop_stale(seat)
        if not self._marks.is_new(device.device_id, head.freshness):
            return self._reply_again(seat, message)
        now_unix_seconds, began_seconds = int(self._unix_clock()), self._clock()
        serving = self._keyring.find(head.serial, now_unix_seconds)
        with self._budget.work():
            self._buckets.take(device.device_id)
            request = decode_open(
                message, head, device.device_id, device.identity, serving, self._unseal
            )
            digest = hashlib.sha256(message).digest()
            reply = SessionReply(
                self._new_session_id(),
                draw(self._random_bytes, SECRET_BYTES),
                self._incarnation,
                now_unix_seconds,
                group_keys,
                self._has_clash(device.device_id, request.run),
            )
            reply_message = encode_reply(
                reply, digest, request.ephemeral, serving.sessions, self._seal
            )
        # Not before: an open that found no time may come again, and who has the admission key but
        # not the identity must not be able to raise the mark above all that the device will send.
        self._marks.raise_to(device.device_id, head.freshness)
        keys = derive_session_keys(request.secret, reply.secret, message, reply_message)
        session = Session(reply.session_id, keys, End.AGGREGATOR, self._clock)
        self._schedule.opened(device.device_id, self._clock() - began_seconds)
        self._seats[device.device_id] = seat
        self._wait(device.device_id, seat, _Pending(session, digest, reply_message, self._clock()))
        return reply_message

    def take_clashed(self, device_id: bytes) -> bool:
        """Whether its last open showed that two machines have its identity; said once for each."""
        if device_id in self._clashed:
            self._clashed.remove(device_id)
            return True
        return False

    def _has_clash(self, device_id: bytes, run: bytes) -> bool:
        now = self._clock()
        runs = self._runs.get(device_id)
        if runs is None:
            self._runs[device_id] = _Runs(run)
            return False
        if runs.opened(run, now):
            self._clashed.add(device_id)
        return now - runs.clashed_seconds < _CLASH_SECONDS

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

    def deny(self, device_id: bytes, handle: bytes, message: bytes) -> bytes:
        """The signed word to a device that the session of an envelope, which :meth:`receive`
        refused as ``unknown-session``, is not open here, and when to come for another.

        Raises ``WireError``: ``too-many`` (one in two seconds for each device), ``busy``.
        """
        session_id = read_header(message).session_id
        self._denials.take(device_id)
        with self._denials_budget.work():
            keys = self._keyring.newest
            # Who has a session sent this long ago, or somebody else did: nobody is to come.
            is_lost = not self.has_session(device_id)
            wait_seconds = self._schedule.wait_seconds(device_id) if is_lost else 0.0
            return sign_no_session(
                session_id,
                self._incarnation,
                handle,
                keys.descriptor,
                keys.sessions,
                wait_seconds,
            )

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

    def seal_newest(self, device_id: bytes, message_type: int, payload: bytes) -> bytes:
        """As :meth:`seal`, under the session granted last, whether it was used or not: for what
        follows the reply."""
        seat = self._seats.get(device_id)
        if seat is None or not seat.pending:
            return self.seal(device_id, message_type, payload)
        return seat.pending[-1].session.seal(message_type, payload)

    def has_session(self, device_id: bytes) -> bool:
        """Whether the device has a live session that can still be sent under."""
        seat = self._seats.get(device_id)
        return seat is not None and seat.live is not None and not seat.live.is_spent()

    def end(self, device_id: bytes) -> None:
        """End all sessions of a device at once, for good (it was revoked)."""
        self._marks.forget(device_id)
        self._runs.pop(device_id, None)
        seat = self._seats.pop(device_id, None)
        if seat is not None:
            self._forget(seat.live)
            for pending in seat.pending:
                self._forget(pending.session)

    def sweep(self) -> None:
        """Forget sessions that ended or were never used. To be called now and then."""
        self._schedule.sweep()
        for device_id in list(self._seats):
            seat = self._seats[device_id]
            self._drop_stale(seat)
            if seat.live is not None and seat.live.is_expired():
                self._forget(seat.live)
                seat.live = None
            if seat.live is None and not seat.pending:
                del self._seats[device_id]
                self._runs.pop(device_id, None)

    def __contains__(self, device_id: bytes) -> bool:
        """Whether a session of the device is live or waits."""
        return device_id in self._seats

    def __len__(self) -> int:
        """Live and waiting sessions."""
        return len(self._owners)

    def _new_session_id(self) -> bytes:
        while True:
            session_id = draw(self._random_bytes, SESSION_ID_BYTES)
            if session_id not in self._owners:
                return session_id

    def _reply_again(self, seat: _Seat, message: bytes) -> bytes:
        newest = seat.pending[-1] if seat.pending else None
        digest = hashlib.sha256(message).digest()
        if newest is None or newest.open_digest != digest or self._is_stale(newest):
            raise WireError("replayed", "the device opened with this counter, or a higher one")
        if newest.repeats_left == 0:
            raise WireError("replayed", "this open was answered often enough")
        newest.repeats_left -= 1
        return newest.reply

    def _wait(self, device_id: bytes, seat: _Seat, pending: _Pending) -> None:
        seat.pending.append(pending)
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
        # The newest stays while it lives, used or not: its device may have nothing to say, and is
        # told things under it.
        while len(seat.pending) > 1 and self._is_stale(seat.pending[0]):
            self._forget(seat.pending.pop(0).session)
        if seat.pending and seat.pending[0].session.is_expired():
            self._forget(seat.pending.pop(0).session)

    def _is_stale(self, pending: _Pending) -> bool:
        return self._clock() - pending.granted_at_seconds >= PENDING_SECONDS

    def _forget(self, session: Session | None) -> None:
        if session is not None:
            del self._owners[session.session_id]
