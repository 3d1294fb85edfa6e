"""The bounded queue between a link's thread and the program that uses the link."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from device_sdk.link.events import Event, Message

_MOST_NOTICES = 4096
_CROWD = 4


class EventQueue:
    """Events in order. Full of messages, it asks the link to stop reading instead of dropping any.

    The bound is soft by the few messages that one read of the socket may bring. Notices (all
    events that are not messages) are few, but the newest are dropped, and counted in ``dropped``,
    when nobody takes them. ``on_event`` is called after each event, on the thread that put it.
    """

    def __init__(
        self,
        *,
        most_messages: int,
        most_bytes: int,
        on_room: Callable[[], None],
        on_event: Callable[[], None] | None = None,
    ) -> None:
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._on_room = on_room
        self._on_event = on_event
        self._changed = threading.Condition(threading.Lock())
        self._events: deque[Event] = deque()
        self._by_topic: Counter[str] = Counter()
        self._messages = 0
        self._bytes = 0
        self._paused = False
        self._nudged = False
        self.dropped = 0

    def put(self, event: Event) -> None:
        """Append an event and wake a waiting ``take``. Never blocks."""
        with self._changed:
            if isinstance(event, Message):
                self._messages += 1
                self._bytes += len(event.payload) + len(event.topic)
                self._by_topic[event.topic] += 1
            elif len(self._events) - self._messages >= _MOST_NOTICES:
                self.dropped += 1
                return
            self._events.append(event)
            self._changed.notify()
        if self._on_event is not None:
            self._on_event()

    def nudge(self) -> None:
        """A ``take`` that waits, or the next that would, returns at once."""
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def take(self, most: int, timeout_seconds: float | None) -> list[Event]:
        """Up to ``most`` events, waiting for the first; empty when the time passed without any."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._nudged, timeout_seconds)
            self._nudged = False
            taken = [self._events.popleft() for _ in range(min(most, len(self._events)))]
            for event in taken:
                if isinstance(event, Message):
                    self._messages -= 1
                    self._bytes -= len(event.payload) + len(event.topic)
                    self._by_topic[event.topic] -= 1
                    if not self._by_topic[event.topic]:
                        del self._by_topic[event.topic]
            room = (
                self._paused
                and 2 * self._messages <= self._most_messages
                and 2 * self._bytes <= self._most_bytes
            )
            if room:
                self._paused = False
        if room:
            self._on_room()
        return taken

    def crowded(self, topic: str) -> bool:
        """Whether half of the messages that fit are waiting, and several of them are ``topic``'s.

        Who then leaves out more of the same topic keeps room for the others.
        """
        with self._changed:
            return 2 * self._messages >= self._most_messages and self._by_topic[topic] >= _CROWD

    @property
    def paused(self) -> bool:
        """Whether the link must not read: set when full, cleared when half of it was taken."""
        with self._changed:
            if self._messages >= self._most_messages or self._bytes >= self._most_bytes:
                self._paused = True
            return self._paused
