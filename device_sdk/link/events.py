"""What a link reports: typed events, and the fate of each publication."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from device_sdk.system.clock import Backoff

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


# What waits to be told to the broker: publications, within limits, and changed subscriptions.

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
