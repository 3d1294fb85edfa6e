"""Cheap refusal first: a short HMAC and two bounds stand before any public-key work.

An HMAC takes a few microseconds, opening a sealed message hundreds. Only who holds a code or an
admission key gets past the HMAC, and a message only once (:mod:`freshness`), so an outsider cannot
make the aggregator work; a bucket bounds what one insider can make it do, and the budget what all
of them can together.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TypeAlias

from device_sdk.wire.codec.errors import WireError

TAG_BYTES = 16
Clock: TypeAlias = Callable[[], float]
"""Seconds since some fixed moment, never falling."""


class AdmissionPurpose(Enum):
    """What an admission tag is for. The value is the label that the HMAC covers."""

    ENROL = b"tessera/1 enrol admission"
    SESSION_OPEN = b"tessera/1 session open admission"


def admission_tag(key: bytes, purpose: AdmissionPurpose, message: bytes) -> bytes:
    """16 bytes: HMAC-SHA256(key, label || 0x00 || message), cut."""
    label = purpose.value + b"\x00"
    return hmac.digest(key, label + message, hashlib.sha256)[:TAG_BYTES]


def check_admission(key: bytes, purpose: AdmissionPurpose, message: bytes, tag: bytes) -> None:
    """Raises ``WireError("bad-admission")`` unless ``tag`` is the message's under ``key``."""
    if not hmac.compare_digest(admission_tag(key, purpose, message), tag):
        raise WireError("bad-admission", "the admission tag is wrong")


class TokenBucket:
    """At most ``capacity`` at once and ``refill_per_second`` over time. Starts full."""

    def __init__(self, capacity: float, refill_per_second: float, clock: Clock) -> None:
        if capacity < 1 or refill_per_second <= 0:
            raise ValueError(
                f"a bucket of {capacity} refilled by {refill_per_second} a second would never "
                "let anything through: capacity must be at least 1 and the refill above 0"
            )
        self._capacity = capacity
        self._refill_per_second = refill_per_second
        self._clock = clock
        self._level = capacity
        self._filled_at_seconds = clock()

    def take(self) -> None:
        """Take one token. Raises ``WireError("too-many")`` when there is none."""
        if not self.allows():
            raise WireError("too-many", "more attempts than the limit allows; try again later")

    def allows(self) -> bool:
        """Take one token; whether there was one."""
        self._fill()
        if self._level < 1:
            return False
        self._level -= 1
        return True

    def is_empty(self) -> bool:
        """Whether :meth:`take` would refuse."""
        self._fill()
        return self._level < 1

    def is_full(self) -> bool:
        """Whether the bucket is as good as new."""
        self._fill()
        return self._level >= self._capacity

    def _fill(self) -> None:
        now_seconds = self._clock()
        # A clock that falls (a restored virtual machine) must not drain the bucket.
        elapsed_seconds = max(0.0, now_seconds - self._filled_at_seconds)
        self._filled_at_seconds = now_seconds
        self._level = min(self._capacity, self._level + elapsed_seconds * self._refill_per_second)


class TokenBuckets:
    """One bucket for each key (a device id, a token id); full ones are forgotten.

    Ask only with keys that were given out: then there are at most as many buckets as devices and
    codes. After an HMAC that was right nobody can take another's tokens; before it, whoever can
    write to the same topic can.
    """

    _SWEEP_EVERY = 1024

    def __init__(self, capacity: float, refill_per_second: float, clock: Clock) -> None:
        TokenBucket(capacity, refill_per_second, clock)  # refuse bad numbers now
        self._capacity = capacity
        self._refill_per_second = refill_per_second
        self._clock = clock
        self._buckets: dict[bytes, TokenBucket] = {}
        self._until_sweep = self._SWEEP_EVERY

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: bytes) -> None:
        """Take one token of ``key``'s bucket. Raises ``WireError("too-many")``."""
        self._bucket(key).take()

    def allows(self, key: bytes) -> bool:
        """Take one token of ``key``'s bucket; whether there was one."""
        return self._bucket(key).allows()

    def _bucket(self, key: bytes) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            self._make_room()
            bucket = TokenBucket(self._capacity, self._refill_per_second, self._clock)
            self._buckets[key] = bucket
        return bucket

    def is_empty(self, key: bytes) -> bool:
        """Whether :meth:`take` would refuse this key. Makes no bucket."""
        bucket = self._buckets.get(key)
        return bucket is not None and bucket.is_empty()

    def _make_room(self) -> None:
        self._until_sweep -= 1
        if self._until_sweep > 0:
            return
        self._buckets = {
            key: bucket for key, bucket in self._buckets.items() if not bucket.is_full()
        }
        # Waiting for as many new keys as are left keeps the sweeps' cost constant per new key.
        self._until_sweep = max(self._SWEEP_EVERY, len(self._buckets))


class WorkBudget:
    """Holds some work to a share of the time, whoever asks for it and however fast the machine is.

    On average ``share`` of the time goes into the work, and at most ``burst_seconds`` and one piece
    of it at once, so that what else the thread has to do always gets the rest. Of a piece in which
    the process stood still no more than ``burst_seconds`` is owed.
    Raises ValueError unless 0 < ``share`` <= 1 and 0 < ``burst_seconds``.
    """

    def __init__(self, share: float, clock: Clock, *, burst_seconds: float = 1.0) -> None:
        if not (0 < share <= 1 and burst_seconds > 0):
            raise ValueError(
                f"a share of {share} with {burst_seconds} seconds at once would let nothing "
                "through, or all: expected a share above 0 and at most 1, and seconds above 0"
            )
        self.share = share
        self._clock = clock
        self._burst_seconds = burst_seconds
        self._left_seconds = burst_seconds
        self._seen_seconds = clock()

    @contextmanager
    def work(self) -> Iterator[None]:
        """The work is done within. Raises ``WireError("busy")`` before it when there is no time.

        Work that fails is charged too.
        """
        began_seconds = self._clock()
        # As with a bucket: a clock that falls takes nothing away.
        gained_seconds = max(0.0, began_seconds - self._seen_seconds) * self.share
        self._seen_seconds = began_seconds
        self._left_seconds = min(self._burst_seconds, self._left_seconds + gained_seconds)
        if self._left_seconds <= 0:
            raise WireError("busy", "too many ask at once; try again later")
        try:
            yield
        finally:
            left_seconds = self._left_seconds - max(0.0, self._clock() - began_seconds)
            self._left_seconds = max(-self._burst_seconds, left_seconds)


_FIRST_COST_SECONDS = 0.0005
_WEIGHT = 0.05
_MOST_TIMES = 4.0
_TRIED = 64
_MARGIN = 1.1
_SOON_SECONDS = 1.0
_MISSED_SECONDS = 20.0
_TRUSTED_SECONDS = 2.0


class OpenSchedule:
    """When each device whose session is not open here is to come for another: as many a second as
    can be opened, so that those of a worker that was lost do not all come at once.

    A virtual queue (Turner 1986): each that asks gets the next place, and a place is as long as an
    open takes within ``share`` of the time, as was measured, and a little longer. Before some opens
    were measured, or nobody came for them, there are few places. Who asks again has the same one.
    Ask only with senders that are known: then there are at most as many places as devices.

    Not all who ask come, and anybody may repeat what a device that sleeps once sent. So who asks
    next is told to wait for as much of the row as was used lately: where nobody comes, hardly.

    A process may stand still during an open: a cost counts for a few times what was expected.
    """

    def __init__(self, share: float, clock: Clock) -> None:
        self._share = share
        self._clock = clock
        self._cost_seconds = _FIRST_COST_SECONDS
        self._measured = 0
        self._missed = 0
        self._free_seconds = clock()
        self._places: dict[bytes, float] = {}  # by sender: the clock's time at which it may come
        self._given_seconds = self._taken_seconds = 0.0  # of the row, so far: all, and by an open
        self._swept = (0.0, 0.0)  # passed and taken until the last sweep, and newly then
        self._newly = (0.0, 0.0)
        self._due_seconds = self._used_seconds = 0.0  # weigh half as much at each sweep

    def __len__(self) -> int:
        return len(self._places)

    def wait_seconds(self, sender: bytes) -> float:
        """How long a sender is to wait; 0 for about a second or less, which nobody needs to be
        told. Raises ``WireError("busy")`` where that cannot be said yet."""
        at_seconds = self._places.get(sender)
        if at_seconds is None:
            if self._measured + self._missed < _TRIED <= len(self._places):
                raise WireError("busy", "nobody knows yet what opens cost here; try again later")
            at_seconds = self._places[sender] = self._take()
        wait_seconds = at_seconds - self._clock()
        return wait_seconds if wait_seconds > _SOON_SECONDS else 0.0

    def opened(self, sender: bytes, cost_seconds: float) -> None:
        """A sender has another session, which took so long of the share."""
        self._measured += 1
        most_seconds = _MOST_TIMES * max(self._cost_seconds, _FIRST_COST_SECONDS)
        cost_seconds = min(max(0.0, cost_seconds), most_seconds)
        self._cost_seconds += _WEIGHT * (cost_seconds - self._cost_seconds)
        self._taken_seconds += self._length_seconds
        if self._places.pop(sender, None) is None:
            self._take()  # it came unasked

    def sweep(self) -> None:
        """Forget who did not come. To be called every few seconds."""
        now = self._clock()
        kept = {each: at for each, at in self._places.items() if at > now - _MISSED_SECONDS}
        self._missed += len(self._places) - len(kept)
        self._places = kept
        row_seconds = len(kept) * self._length_seconds
        self._free_seconds = min(self._free_seconds, now + row_seconds)
        # Each a sweep later: who comes for a place does so a little after its time.
        self._due_seconds = (self._due_seconds + self._newly[0]) / 2
        self._used_seconds = (self._used_seconds + self._newly[1]) / 2
        passed_seconds = self._given_seconds - max(0.0, self._free_seconds - now)
        self._newly = (passed_seconds - self._swept[0], self._taken_seconds - self._swept[1])
        self._swept = (passed_seconds, self._taken_seconds)

    @property
    def _length_seconds(self) -> float:
        return self._cost_seconds * _MARGIN / self._share

    def _take(self) -> float:
        now = self._clock()
        ahead_seconds = max(0.0, self._free_seconds - now)
        self._free_seconds = now + ahead_seconds + self._length_seconds
        self._given_seconds += self._length_seconds
        used_seconds = min(self._used_seconds, self._due_seconds)
        used = (_TRUSTED_SECONDS + used_seconds) / (_TRUSTED_SECONDS + self._due_seconds)
        return now + used * ahead_seconds
