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
    of it at once, so that what else the thread has to do always gets the rest.
    Raises ValueError unless 0 < ``share`` <= 1 and 0 < ``burst_seconds``.
    """

    def __init__(self, share: float, clock: Clock, *, burst_seconds: float = 1.0) -> None:
        if not (0 < share <= 1 and burst_seconds > 0):
            raise ValueError(
                f"a share of {share} with {burst_seconds} seconds at once would let nothing "
                "through, or all: expected a share above 0 and at most 1, and seconds above 0"
            )
        self._share = share
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
        gained_seconds = max(0.0, began_seconds - self._seen_seconds) * self._share
        self._seen_seconds = began_seconds
        self._left_seconds = min(self._burst_seconds, self._left_seconds + gained_seconds)
        if self._left_seconds <= 0:
            raise WireError("busy", "too many ask at once; try again later")
        try:
            yield
        finally:
            self._left_seconds -= max(0.0, self._clock() - began_seconds)
