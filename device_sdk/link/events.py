"""What a link reports: typed events, and the fate of each publication."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

PACKET_TOO_LARGE = 149
"""A broker's reason code, for a message that its limits forbid and its CONNACK allowed."""

TAKEN_OVER = 142
"""A broker's reason code, to a client whose id another client has connected with."""

# Which version of MQTT to try next: 5 where the broker speaks it, else 3.1.1.


class MqttVersion(Enum):
    """The versions that a link speaks."""

    V5 = "5"
    V311 = "3.1.1"


class VersionChoice:
    """Finds the broker's version by trying, 5 first.

    A broker that speaks only 3.1.1 may refuse a version-5 connect, close the connection, or answer
    nothing: all three look like a broker that just broke. So a version that has worked is given up
    only after several failures in a row, and after 3.1.1 failed as well the choice is 5 again.
    """

    _PATIENCE = 3

    def __init__(self) -> None:
        self.current = MqttVersion.V5
        self._proven = False
        self._failures = 0

    @property
    def probing(self) -> bool:
        """Whether it is not yet known that the broker speaks version 5, which is tried now."""
        return self.current is MqttVersion.V5 and not self._proven

    def accepted(self) -> None:
        """The broker accepted a connection of the current version."""
        self._proven = True
        self._failures = 0

    def rejected(self) -> bool:
        """The broker was reached, but sent no CONNACK (or one that refuses the version).

        Returns whether to try the new choice at once, without back-off.
        """
        self._failures += 1
        if self._proven and self._failures < self._PATIENCE:
            return False
        downgrade = self.current is MqttVersion.V5
        self.current = MqttVersion.V311 if downgrade else MqttVersion.V5
        self._proven = False
        self._failures = 0
        return downgrade


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the broker's CONNACK allows; on 3.1.1, which has no such fields, the specification's."""

    receive_maximum: int = 65_535
    """Publications of QoS 1 that may be unacknowledged at a time."""
    maximum_packet_bytes: int | None = None
    maximum_qos: int = 1
    retain_available: bool = True
    keepalive_seconds: int | None = None
    """The broker's own choice, when it made one."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The broker accepted the connection. Subscriptions are being made anew."""

    version: MqttVersion
    limits: ServerLimits


@dataclass(frozen=True, slots=True)
class Disconnected:
    """There is no connection, or a try to make one failed. The next comes in ``retry_seconds``.

    ``reason`` is a slug: ``files`` (those of the way cannot be used), ``unreachable``, ``tls``,
    ``timeout``, ``no-connack``, ``version``, ``closed``, ``server`` (the broker said why),
    ``stalled``, ``consumer-stalled``, ``protocol``, ``moved`` (to another broker, as we wished).
    ``code`` is the broker's reason code where it sent one.
    """

    reason: str
    detail: str
    retry_seconds: float
    code: int | None = None


@dataclass(frozen=True, slots=True)
class ConnectRefused:
    """The broker answered with a refusal (bad user or password, not authorised, busy ...)."""

    code: int
    detail: str
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class Message:
    """A publication that arrived; ``retained``: the broker had stored it before we subscribed;
    ``place``: of several brokers, by which it came, the first one 0."""

    topic: str
    payload: bytes
    retained: bool
    place: int = 0


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The broker granted a subscription. Comes again after each reconnection."""

    topic_filter: str
    qos: int


@dataclass(frozen=True, slots=True)
class SubscribeRefused:
    """The broker refused a subscription.

    It is asked for again in ``retry_seconds``, or at the next connection if that comes first.
    """

    topic_filter: str
    code: int
    detail: str
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class PublishRefused:
    """The broker refused a publication (``code``), or its limits did (``code`` None)."""

    topic: str
    code: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The link's thread has ended: nothing follows."""


Event = (
    Connected
    | Disconnected
    | ConnectRefused
    | Message
    | Subscribed
    | SubscribeRefused
    | PublishRefused
    | Stopped
)


class Outcome(Enum):
    """The fate of a publication."""

    ACKNOWLEDGED = "acknowledged"
    """The broker took it (QoS 1), or it was written to the socket (QoS 0). No more than that."""
    REFUSED = "refused"
    LOST = "lost"
    """The connection ended before the acknowledgement: it may or may not have arrived."""
    DROPPED = "dropped"
    """The link stopped before it was sent."""


@dataclass(slots=True, eq=False)
class Delivery:
    """A publication on its way. ``outcome`` is None until its fate is known."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    # One condition for all deliveries of a link: an object of its own for each would cost more
    # than the rest of a publication.
    done: threading.Condition
    outcome: Outcome | None = None
    detail: str = ""
    code: int | None = None
    """The broker's, where it refused it."""
    silent_seconds: float = 0.0
    """How long the broker owed this acknowledgement, and sent no other meanwhile."""

    def wait(self, timeout_seconds: float) -> Outcome | None:
        """The outcome, waiting for it; None when ``timeout_seconds`` passed without one."""
        with self.done:
            self.done.wait_for(lambda: self.outcome is not None, timeout_seconds)
        return self.outcome


def settle(deliveries: Sequence[Delivery], outcome: Outcome, detail: str) -> None:
    """Decide the fate of some deliveries of one link, and wake whoever waits for it."""
    if not deliveries:
        return
    with deliveries[0].done:
        for delivery in deliveries:
            delivery.detail = detail
            delivery.outcome = outcome
        deliveries[0].done.notify_all()


# The bounded queue between a link's thread and the program that uses the link.

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
        if isinstance(event, Message):
            self.put_messages((event,))
            return
        with self._changed:
            if len(self._events) - self._messages >= _MOST_NOTICES:
                self.dropped += 1
                return
            self._events.append(event)
            self._changed.notify()
        if self._on_event is not None:
            self._on_event()

    def put_messages(self, messages: Sequence[Message]) -> None:
        """As :meth:`put`, for messages that came together."""
        with self._changed:
            self._messages += len(messages)
            for message in messages:
                self._bytes += len(message.payload) + len(message.topic)
                self._by_topic[message.topic] += 1
            self._events.extend(messages)
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
