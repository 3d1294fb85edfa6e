"""What the sans-io parts ask of whoever runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Publish:
    """Send ``payload`` to ``topic``, not retained, at QoS 1."""

    topic: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe (again), so that the broker sends what it retains."""

    topic_filter: str


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """End a subscription."""

    topic_filter: str


Action = Publish | Subscribe | Unsubscribe


class Actions:
    """A queue of actions, filled by several parts and emptied by their runner."""

    def __init__(self) -> None:
        self._waiting: deque[Action] = deque()

    def publish(self, topic: str, payload: bytes) -> None:
        """Ask for a publication."""
        self._waiting.append(Publish(topic, payload))

    def subscribe(self, topic_filter: str) -> None:
        """Ask for a subscription."""
        self._waiting.append(Subscribe(topic_filter))

    def unsubscribe(self, topic_filter: str) -> None:
        """Ask for the end of a subscription."""
        self._waiting.append(Unsubscribe(topic_filter))

    def drain(self) -> Iterator[Action]:
        """Take all actions, in order."""
        while self._waiting:
            yield self._waiting.popleft()
