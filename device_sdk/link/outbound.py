"""What waits to be told to the broker: publications, within limits, and changed subscriptions."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence

from device_sdk.link.events import Delivery, ServerLimits
from device_sdk.system.clock import Backoff

_MOST_MQTT_BYTES = 2**28 - 1
_MOST_HEAD_BYTES = 65_545


class LinkError(Exception):
    """A publication was not taken. ``reason``: ``queue-full``, ``too-large`` or ``stopped``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.taken = 0
        """Of several publications, how many were taken before."""


class SendQueue:
    """A first-in, first-out queue bounded by messages and by bytes. Safe between threads."""

    def __init__(self, *, most_messages: int, most_bytes: int) -> None:
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._waiting: tuple[deque[Delivery], deque[Delivery]] = (deque(), deque())  # by QoS
        self._bytes = 0
        self._closed = False

    def put(self, delivery: Delivery) -> None:
        """Append. Raises :class:`LinkError`."""
        self.put_each((delivery,))

    def put_each(self, deliveries: Sequence[Delivery]) -> None:
        """Append as many as there is room for, in order. Raises :class:`LinkError`; its ``taken``
        says how many were appended."""
        with self._lock:
            for taken, delivery in enumerate(deliveries):
                error = self._unfit(delivery)
                if error is not None:
                    error.taken = taken
                    raise error
                self._waiting[delivery.qos].append(delivery)
                self._bytes += len(delivery.payload)

    def _unfit(self, delivery: Delivery) -> LinkError | None:
        size = len(delivery.payload)
        if (
            size > _MOST_MQTT_BYTES - _MOST_HEAD_BYTES
            and packet_bytes(delivery.topic, delivery.payload) > _MOST_MQTT_BYTES
        ):
            return LinkError("too-large", "MQTT carries at most 256 MiB a message")
        if self._closed:
            return LinkError("stopped", "the link was stopped")
        if len(self) >= self._most_messages or self._bytes + size > self._most_bytes:
            return LinkError("queue-full", f"{len(self)} publications are waiting already")
        return None

    def take(self, qos: int, most: int) -> list[Delivery]:
        """The oldest of this QoS, at most ``most`` of them."""
        with self._lock:
            waiting = self._waiting[qos]
            taken = [waiting.popleft() for _ in range(min(most, len(waiting)))]
            self._bytes -= sum(len(delivery.payload) for delivery in taken)
        return taken

    def waiting(self, qos: int) -> int:
        """How many of this QoS wait."""
        return len(self._waiting[qos])

    def close(self) -> None:
        """Take no more."""
        with self._lock:
            self._closed = True

    def __len__(self) -> int:
        return sum(map(len, self._waiting))


def packet_bytes(topic: str, payload: bytes) -> int:
    """An upper bound of the PUBLISH packet: header 5, topic length 2, packet id 2, properties 1."""
    return 10 + len(topic.encode()) + len(payload)


def refusal(delivery: Delivery, limits: ServerLimits) -> str | None:
    """Why the broker's limits forbid this publication, or None."""
    most = limits.maximum_packet_bytes
    size = packet_bytes(delivery.topic, delivery.payload)
    if most is not None and size > most:
        return f"a packet of {size} bytes; the broker takes at most {most}"
    if delivery.retain and not limits.retain_available:
        return "the broker keeps no retained messages"
    return None


class Subscriptions:
    """Topic filters with their QoS, and what the broker has not been told yet.

    Safe between threads. A new connection is told all filters; changes are kept apart only while
    there is one. What the broker refused is told again after a while, with waits that grow until
    it is granted. ``backoff`` makes the waits of one filter; it is called, and what it makes is
    used, only where :meth:`refused` is.

    An *optional* filter must not stand in the way of the others. Refused, it waits for the next
    connection; where a broker ended the connection in place of an answer, for the one after it.
    Until it is granted nothing that asks for it again does so earlier.
    """

    def __init__(self, backoff: Callable[[], Backoff]) -> None:
        self._make_backoff = backoff
        self._lock = threading.Lock()
        self._filters: dict[str, int] = {}
        self._optional: set[str] = set()
        self._granted: set[str] = set()  # of the optional ones, on this connection
        self._left_out: set[str] = set()
        self._changes: list[tuple[str, int | None]] = []
        self._backoffs: dict[str, Backoff] = {}
        self._due_seconds: dict[str, float] = {}
        self._connected = False

    def add(self, topic_filter: str, qos: int, *, optional: bool = False) -> None:
        """Subscribe, or change the QoS."""
        with self._lock:
            is_ungranted = topic_filter in self._optional - self._granted
            self._filters[topic_filter] = qos
            if optional:
                self._optional.add(topic_filter)
            self._due_seconds.pop(topic_filter, None)
            if self._connected and not is_ungranted:
                self._changes.append((topic_filter, qos))

    def remove(self, topic_filter: str) -> bool:
        """Unsubscribe; whether there was such a subscription."""
        with self._lock:
            if self._filters.pop(topic_filter, None) is None:
                return False
            self._backoffs.pop(topic_filter, None)
            self._optional.discard(topic_filter)
            if self._connected:
                self._changes.append((topic_filter, None))
            return True

    def connected(self) -> list[tuple[str, int]]:
        """All filters, to ask a new connection for; changes count from here on."""
        with self._lock:
            self._changes.clear()
            self._connected = True
            left_out, self._left_out = self._left_out, set()
            return [each for each in self._filters.items() if each[0] not in left_out]

    def disconnected(self, hung_up_on: Collection[str] = ()) -> None:
        """The connection ended; ``hung_up_on``: filters for which the broker may have ended it."""
        with self._lock:
            self._left_out |= self._optional.intersection(hung_up_on)
            self._connected = False
            self._granted.clear()
            self._due_seconds.clear()

    def granted(self, topic_filter: str) -> None:
        """The broker granted it: should it refuse it later, the waits start anew."""
        with self._lock:
            self._backoffs.pop(topic_filter, None)
            if topic_filter in self._optional:
                self._granted.add(topic_filter)

    def refused(self, topic_filter: str, now: float) -> float | None:
        """The broker refused it; in how many seconds it will be asked for again, if at all."""
        with self._lock:
            if topic_filter in self._optional:
                return None
            backoff = self._backoffs.setdefault(topic_filter, self._make_backoff())
            wait_seconds = backoff.next_seconds()
            self._due_seconds[topic_filter] = now + wait_seconds
            return wait_seconds

    def next_seconds(self) -> float:
        """By the clock, when the next refused filter is due; infinity for none."""
        with self._lock:
            return min(self._due_seconds.values(), default=math.inf)

    def take_changes(self, now: float) -> list[tuple[str, int | None]]:
        """What changed since the last call, in order, and the refused filters that are due.

        QoS None where a subscription ended.
        """
        with self._lock:
            taken, self._changes = self._changes, []
            for topic_filter in [name for name, at in self._due_seconds.items() if at <= now]:
                del self._due_seconds[topic_filter]
                if topic_filter in self._filters:  # else it was withdrawn before the answer came
                    taken.append((topic_filter, self._filters[topic_filter]))
            return taken
