"""Publications that wait for a connection, and the limits that they must keep."""

from __future__ import annotations

import threading
from collections import deque

from device_sdk.link.events import Delivery, ServerLimits

_MOST_MQTT_BYTES = 2**28 - 1


class LinkError(Exception):
    """A publication was not taken. ``reason``: ``queue-full``, ``too-large`` or ``stopped``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


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
        if packet_bytes(delivery) > _MOST_MQTT_BYTES:
            raise LinkError("too-large", "MQTT carries at most 256 MiB a message")
        with self._lock:
            if self._closed:
                raise LinkError("stopped", "the link was stopped")
            if (
                len(self) >= self._most_messages
                or self._bytes + len(delivery.payload) > self._most_bytes
            ):
                raise LinkError("queue-full", f"{len(self)} publications are waiting already")
            self._waiting[delivery.qos].append(delivery)
            self._bytes += len(delivery.payload)

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


def packet_bytes(delivery: Delivery) -> int:
    """An upper bound of the PUBLISH packet: header 5, topic length 2, packet id 2, properties 1."""
    return 10 + len(delivery.topic.encode()) + len(delivery.payload)


def refusal(delivery: Delivery, limits: ServerLimits) -> str | None:
    """Why the broker's limits forbid this publication, or None."""
    most = limits.maximum_packet_bytes
    size = packet_bytes(delivery)
    if most is not None and size > most:
        return f"a packet of {size} bytes; the broker takes at most {most}"
    if delivery.retain and not limits.retain_available:
        return "the broker keeps no retained messages"
    return None
