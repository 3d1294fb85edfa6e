"""How many messages a topic may bring, decided before anything is done with one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from device_sdk.wire.admission import Clock, TokenBucket, TokenBuckets

__all__ = ["Limit", "TopicLimits"]


@dataclass(frozen=True, slots=True)
class Limit:
    """Messages: so many at once, and so many a second over time."""

    burst: float
    per_second: float


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
        self._lock = threading.Lock()
        self._refused: Counter[bytes] = Counter()

    def admits(self, topic: bytes) -> bool:
        """Whether to take one more message of this topic."""
        owner = self._owner_of(topic)
        within = self._others.allows() if owner is None else self._each.allows(owner)
        if within and not self._crowded(topic):
            return True
        with self._lock:
            self._refused[owner or b""] += 1
        return False

    def take_refused(self) -> Counter[bytes]:
        """How many messages were refused since the last call, by owner; empty bytes for none."""
        with self._lock:
            taken, self._refused = self._refused, Counter()
        return taken
