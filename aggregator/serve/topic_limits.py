"""How many messages a topic may bring, decided before anything is done with one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from device_sdk.wire.seal.admission import Clock, TokenBucket, TokenBuckets

__all__ = ["Limit", "TopicLimits"]


@dataclass(frozen=True, slots=True)
class Limit:
    """Messages: so many at once, and so many a second over time."""

    burst: float
    per_second: float


class _Shut(NamedTuple):
    owner: bytes
    until_seconds: float


class TopicLimits:
    """A limit for each topic that somebody owns, and one for all others together.

    ``owner_of`` names a topic's owner, None for none. ``crowded`` tells whether we are behind and
    this topic has messages waiting: then others' go first, whatever the limits. :meth:`admits` is
    for the thread that reads, :meth:`take_refused` for any. It stands before every HMAC: a flood on
    one topic costs a look-up a message, and takes nothing from the other topics. Whoever can write
    to a topic can use up its limit, so who can is for the broker's access rules to say.
    """

    def __init__(
        self,
        owner_of: Callable[[bytes], bytes | None],
        each: Limit,
        others: Limit,
        clock: Clock,
        crowded: Callable[[bytes], bool] = lambda topic: False,
    ) -> None:
        self._owner_of = owner_of
        self._crowded = crowded
        self._each = TokenBuckets(each.burst, each.per_second, clock)
        self._others = TokenBucket(others.burst, others.per_second, clock)
        self._clock = clock
        # Until its next token a topic need not be looked at twice. At most as many as owners.
        self._shut: dict[bytes, _Shut] = {}
        self._shut_seconds = 1.0 / each.per_second
        self._lock = threading.Lock()
        self._refused: Counter[bytes] = Counter()

    def admits(self, topic: bytes) -> bool:
        """Whether to take one more message of this topic."""
        now = self._clock()
        shut = self._shut.get(topic)
        if shut is not None:
            if now < shut.until_seconds:
                return self._refuse(shut.owner)
            del self._shut[topic]
        owner = self._owner_of(topic)
        within = self._others.allows() if owner is None else self._each.allows(owner)
        if within and not self._crowded(topic):
            return True
        if owner is not None and not within:
            self._shut[topic] = _Shut(owner, now + self._shut_seconds)
        return self._refuse(owner or b"")

    def _refuse(self, owner: bytes) -> bool:
        with self._lock:
            self._refused[owner] += 1
        return False

    def take_refused(self) -> Counter[bytes]:
        """How many messages were refused since the last call, by owner; empty bytes for none."""
        with self._lock:
            taken, self._refused = self._refused, Counter()
        return taken
