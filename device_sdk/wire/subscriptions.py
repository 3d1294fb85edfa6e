"""What a link is subscribed to, whether or not there is a connection."""

from __future__ import annotations

import threading


class Subscriptions:
    """Topic filters with their QoS, and what the broker has not been told yet.

    Safe between threads. A new connection is told all filters; changes are kept apart only while
    there is one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._filters: dict[str, int] = {}
        self._changes: list[tuple[str, int | None]] = []
        self._connected = False

    def add(self, topic_filter: str, qos: int) -> None:
        """Subscribe, or change the QoS."""
        with self._lock:
            self._filters[topic_filter] = qos
            if self._connected:
                self._changes.append((topic_filter, qos))

    def remove(self, topic_filter: str) -> bool:
        """Unsubscribe; whether there was such a subscription."""
        with self._lock:
            if self._filters.pop(topic_filter, None) is None:
                return False
            if self._connected:
                self._changes.append((topic_filter, None))
            return True

    def connected(self) -> list[tuple[str, int]]:
        """All filters, to ask a new connection for; changes count from here on."""
        with self._lock:
            self._changes.clear()
            self._connected = True
            return list(self._filters.items())

    def disconnected(self) -> None:
        """The connection ended."""
        with self._lock:
            self._connected = False

    def take_changes(self) -> list[tuple[str, int | None]]:
        """What changed since the last call, in order; QoS None where a subscription ended."""
        with self._lock:
            taken, self._changes = self._changes, []
        return taken
