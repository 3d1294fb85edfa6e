"""The aggregator's connections to the broker, one for each kind of traffic."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from aggregator.events import LogEvent
from aggregator.shared import Shared
from device_sdk.link import LinkSettings
from device_sdk.link.broker_url import BrokerWay
from device_sdk.link.events import (
    PACKET_TOO_LARGE,
    Connected,
    ConnectRefused,
    Delivery,
    Disconnected,
    Event,
    LinkError,
    Message,
    Outcome,
    PublishRefused,
    ServerLimits,
    Subscribed,
    SubscribeRefused,
    packet_bytes,
)
from device_sdk.link.link import Link
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.topics import (
    DescriptorTopic,
    EnrolRequestTopic,
    PresenceTopic,
    ProbeTopic,
    UpTopic,
)
from device_sdk.wire.seal.admission import Clock, TokenBucket, TokenBuckets
from device_sdk.wire.seal.session import MAX_MESSAGE_BYTES

# Connections to several brokers, to which the same is said: a coordinator's to every cell's, and
# those of a fleet that moves from one to another.


@dataclass(frozen=True)
class Deliveries:
    """One publication on its way to several brokers, ``away`` others of which miss it."""

    each: tuple[Delivery, ...]
    away: int = 0

    @property
    def outcome(self) -> Outcome | None:
        """What became of it where it went worst; None while one of them is not known."""
        outcomes = [delivery.outcome for delivery in self.each]
        if None in outcomes:
            return None
        worse = [each for each in outcomes if each is not Outcome.ACKNOWLEDGED]
        return worse[0] if worse else Outcome.ACKNOWLEDGED

    @property
    def silent_seconds(self) -> float:
        """Of the broker that was silent for longest."""
        return max(delivery.silent_seconds for delivery in self.each)


class CellLinks:
    """As :class:`BrokerLinks`, over several of them.

    A broker that is away misses what is published and cleared meanwhile, and gets all of it anew
    when it is there again. What comes is taken from whichever has it; an answer goes to all, for
    its topic is random and its reader connected to one.
    """

    def __init__(self, links: Sequence[BrokerLinks]) -> None:
        self._links = tuple(links)

    @property
    def connected(self) -> bool:
        """Whether the devices of any cell can be reached."""
        return any(link.connected for link in self._links)

    @property
    def broker(self) -> str:
        """Which they are, for people."""
        return ", ".join(
            link.broker if link.connected else f"{link.broker} (away)" for link in self._links
        )

    @property
    def packet_bytes(self) -> int | None:
        """The smallest that any of them takes."""
        known = [each for link in self._links if (each := link.packet_bytes) is not None]
        return min(known, default=None)

    @property
    def problem(self) -> str:
        """Why one of them is away."""
        away = [link for link in self._links if not link.connected and link.problem]
        return "; ".join(f"{link.broker}: {link.problem}" for link in away)

    @property
    def lost(self) -> int:
        return sum(link.lost for link in self._links)

    def start(self) -> None:
        for link in self._links:
            link.start()

    def stop(self, *, flush_seconds: float = 0.0) -> None:
        for link in self._links:
            link.stop(flush_seconds=flush_seconds)

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1
    ) -> Deliveries:
        """Raises LinkError where none takes it, or one that is connected does not."""
        there = [link for link in self._links if link.connected]
        if not there:
            raise LinkError("queue-full", "all brokers are away")
        sent = tuple(link.publish(topic, payload, retain=retain, qos=qos) for link in there)
        return Deliveries(sent, len(self._links) - len(sent))

    def publish_each(self, messages: Sequence[tuple[str, bytes]], *, qos: int) -> None:
        """To all that are connected; raises LinkError where one does not take all of them."""
        for link in self._links:
            if link.connected:
                link.publish_each(messages, qos=qos)

    def events(self, *, most: int = 256, timeout_seconds: float | None = None) -> list[Event]:
        """The first one is waited for; what comes to the others wakes it. That one of several has
        no connection stops nothing: it gets all anew when it has."""
        events: list[Event] = []
        for place, link in enumerate(self._links):
            wait_seconds = timeout_seconds if place == 0 else 0.0
            for event in link.events(most=most, timeout_seconds=wait_seconds):
                if place and isinstance(event, Message):
                    event = replace(event, place=place)
                events.append(event)
        if self.connected:
            return [each for each in events if not isinstance(each, Disconnected | ConnectRefused)]
        return events

    def take_refused(self) -> Counter[bytes]:
        found: Counter[bytes] = Counter()
        for link in self._links:
            found += link.take_refused()
        return found


def links_to(
    shared: Shared,
    settings: LinkSettings,
    rngs: Sequence[np.random.Generator],
    ends: Sequence[tuple[BrokerWay, Hears]],
) -> BrokerLinks:
    """To each of these brokers, as one."""
    links: list[BrokerLinks] = []
    for way, hears in ends:
        at = replace(shared.settings, broker=replace(shared.settings.broker, way=way))
        each = [rng.spawn(1)[0] for rng in rngs]
        nudge = links[0].nudge if links else None
        links.append(BrokerLinks(replace(shared, settings=at), settings, each, hears, nudge))
    # What a service asks of a link, both answer.
    return links[0] if len(links) == 1 else CellLinks(links)  # type: ignore[return-value]


# Notices a broker that acknowledges messages and does not deliver them.

_EVERY_SECONDS = 5.0
_PATIENCE_SECONDS = 20.0
_NUMBER_BYTES = 8
_MOST_WAITING = 16


@dataclass(frozen=True, slots=True)
class _Sent:
    number: bytes
    delivery: Delivery
    at_seconds: float


class LossProbe:
    """Sends a message to itself every five seconds, and watches which come.

    ``send`` publishes at QoS 1, over another connection than the one that it comes back on: what
    the broker acknowledges there tells of this one's queue alone. ``nonce``: tells this process'
    messages from others'.

    A message is lost when the broker acknowledged it and either a later one came, since brokers
    keep the order between two connections, or it did not come within twenty seconds in which we
    were never behind with what did. Who is only slow loses nothing. Nothing is judged before one
    came back: the broker's rules may not allow it.
    """

    def __init__(
        self, send: Callable[[bytes], Delivery | None], nonce: bytes, clock: Clock
    ) -> None:
        self._send = send
        self._nonce = nonce
        self._clock = clock
        self._next_number = 0
        self._next_seconds = clock()
        self._waiting: deque[_Sent] = deque(maxlen=_MOST_WAITING)
        self._behind_at_seconds = clock()
        self._proven = False
        self.lost = 0
        """Messages acknowledged and not delivered, since the start."""

    def interrupted(self) -> None:
        """One of the two connections ended: what was under way proves nothing any more."""
        self._waiting.clear()

    def turn(self, behind: bool) -> None:
        """To be called often, while both connections stand.

        ``behind``: whether more has come than was taken so far.
        """
        now = self._clock()
        if behind:
            self._behind_at_seconds = now
        elif now - self._behind_at_seconds >= _PATIENCE_SECONDS:
            while self._waiting and now - self._waiting[0].at_seconds >= _PATIENCE_SECONDS:
                self._judge(self._waiting.popleft())
        if now < self._next_seconds:
            return
        self._next_seconds = now + _EVERY_SECONDS
        number = self._next_number.to_bytes(_NUMBER_BYTES, "big")
        self._next_number += 1
        delivery = self._send(self._nonce + number)
        if delivery is not None:
            self._waiting.append(_Sent(number, delivery, now))

    def came(self, payload: bytes) -> None:
        """A message came on the probe's topic."""
        number = payload[len(self._nonce) :]
        if payload[: len(self._nonce)] != self._nonce:
            return  # another process', or made up
        if number not in [sent.number for sent in self._waiting]:
            return  # a repetition
        while (sent := self._waiting.popleft()).number != number:
            self._judge(sent)
        self._proven = True

    def _judge(self, sent: _Sent) -> None:
        if self._proven and sent.delivery.outcome is Outcome.ACKNOWLEDGED:
            self.lost += 1


# The largest packet that a broker takes.

_LARGEST_BYTES = MAX_MESSAGE_BYTES + 512
"""Of any packet of ours."""
_SMALLEST_BYTES = 1024
_LOSSES = 2
_ECHO_SECONDS = 3.0


class SizeProbe:
    """Finds it by sending messages to itself, before anything that matters is sent.

    A broker may say its limit when it accepts a connection (MQTT 5), may refuse what exceeds it, or
    end the connection. One of MQTT 3.1.1, which has no word for it, may acknowledge and drop it: so
    a large message has to come back, or else a small one that was sent after it may not. Where
    neither comes in time, we go on as if it had, and look again once the small one comes by itself.
    Where the largest passes, there is no limit. ``send`` publishes at QoS 1, over another
    connection than the one that it comes back on; ``nonce``: tells this process' messages from
    others'.
    """

    def __init__(
        self, send: Callable[[bytes], Delivery | None], topic: str, nonce: bytes, clock: Clock
    ) -> None:
        self._send, self._nonce, self._clock = send, nonce, clock
        self._around = packet_bytes(topic, b"")
        self._size = self._below = self._most = _LARGEST_BYTES
        self._number = 0
        self._delivery: Delivery | None = None
        self._small: Delivery | None = None
        self._asked_seconds = 0.0
        self._came: set[int] = set()  # sizes in which the last question came back
        self._losses = 0
        self._done = False
        self.drops = False
        """Whether it acknowledges what it drops for its size."""

    @property
    def packet_bytes(self) -> int | None:
        """The largest packet that it takes, as far as is known; None: any of ours."""
        return None if self._most >= _LARGEST_BYTES else self._most

    def connected(self, limits: ServerLimits) -> None:
        """There is a connection."""
        self._most = limits.maximum_packet_bytes or _LARGEST_BYTES
        self._size = min(self._below, self._most)
        self._delivery, self._done, self.drops = None, False, False

    def turn(self, comes_back: bool) -> bool:
        """To be called often, while it stands: whether it is known now. ``comes_back``: whether
        the broker said that it shows us what we send."""
        if self._done:
            return True
        if self._delivery is None:
            self._ask()
        elif self._delivery.outcome is Outcome.ACKNOWLEDGED:
            self._judge(comes_back)
        elif self._delivery.outcome is Outcome.REFUSED:
            if self._delivery.code != PACKET_TOO_LARGE:
                self._done = True  # its rules do not let us ask
            else:
                self._halve()
        return self._done

    def came(self, payload: bytes) -> None:
        """A message came on the probe's topic."""
        if payload.startswith(self._marked):
            self._came.add(len(payload))
            self._done = self._done and self._came != {len(self._marked)}

    def interrupted(self) -> None:
        """The connection ended; in the midst of a question twice, the question did it."""
        if self._delivery is not None and not self._done:
            self._lost()
        self._delivery = None

    @property
    def _marked(self) -> bytes:
        return self._nonce + self._number.to_bytes(_NUMBER_BYTES, "big")

    def _ask(self) -> None:
        self._number += 1
        self._small, self._asked_seconds = None, self._clock()
        self._came.clear()
        self._delivery = self._send(self._marked.ljust(self._size - self._around, b"\0"))

    def _judge(self, comes_back: bool) -> None:
        small = len(self._marked)
        late = self._clock() - self._asked_seconds >= _ECHO_SECONDS
        if not comes_back or self._came - {small}:
            self._found(self._size)
        elif late and not self._came:
            self._most, self._done = self._size, True
        elif self._came:
            self._delivery = None
            self.drops = self._lost() or self.drops
        elif self._small is None:
            self._small = self._send(self._marked)

    def _lost(self) -> bool:
        self._losses += 1
        if self._losses < _LOSSES:
            return False
        self._halve()
        return True

    def _halve(self) -> None:
        self._losses, self._delivery = 0, None
        self._size = self._below = max(_SMALLEST_BYTES, self._size // 2)
        if self._size == _SMALLEST_BYTES:
            self._found(self._size)

    def _found(self, size: int) -> None:
        self._most, self._losses, self._done = size, 0, True
        self._below = _LARGEST_BYTES  # the next connection may be to a broker that takes more


# How many messages a topic may bring, decided before anything is done with one.


@dataclass(frozen=True, slots=True)
class Limit:
    """Messages: so many at once, and so many a second over time."""

    burst: float
    per_second: float


OTHER_LIMIT = Limit(burst=16, per_second=4)
"""Of one topic that nobody owns."""


class _Shut(NamedTuple):
    owner: bytes
    until_seconds: float


class TopicLimits:
    """A limit for each topic that somebody owns, and one for all others together, of which each has
    a small part.

    ``owner_of`` names a topic's owner, None for none; ``each_other`` is the part of one that has
    none. ``crowded`` tells whether we are behind and this topic has messages waiting: then others'
    go first, whatever the limits. :meth:`admits` is for the thread that reads, :meth:`take_refused`
    for any. It stands before every HMAC: a flood on one topic costs a look-up a message, and takes
    nothing from the other topics. Whoever can write to a topic can use up its limit, so who can is
    for the broker's access rules to say.
    """

    def __init__(
        self,
        owner_of: Callable[[bytes], bytes | None],
        each: Limit,
        others: Limit,
        clock: Clock,
        crowded: Callable[[bytes], bool] = lambda topic: False,
        each_other: Limit = OTHER_LIMIT,
    ) -> None:
        self._owner_of = owner_of
        self._crowded = crowded
        self._limit, self._packet_bytes = each, MAX_MESSAGE_BYTES
        self._each = TokenBuckets(each.burst, each.per_second, clock)
        self._others = TokenBucket(others.burst, others.per_second, clock)
        self._each_other = TokenBuckets(each_other.burst, each_other.per_second, clock)
        self._clock = clock
        # Until its next token a topic need not be looked at twice. At most as many as owners.
        self._shut: dict[bytes, _Shut] = {}
        self._shut_seconds = 1.0 / each.per_second
        self._lock = threading.Lock()
        self._refused: Counter[bytes] = Counter()

    def packets_of(self, most_bytes: int) -> None:
        """The broker lets messages through of so many bytes at most: an owner may send as many
        bytes as before, in more of them."""
        most_bytes = max(_SMALLEST_BYTES, min(MAX_MESSAGE_BYTES, most_bytes))
        if most_bytes != self._packet_bytes:
            self._packet_bytes = most_bytes
            times = MAX_MESSAGE_BYTES / most_bytes
            burst, per_second = times * self._limit.burst, times * self._limit.per_second
            self._each = TokenBuckets(burst, per_second, self._clock)
            self._shut_seconds = 1.0 / per_second

    def admits(self, topic: bytes) -> bool:
        """Whether to take one more message of this topic."""
        now = self._clock()
        shut = self._shut.get(topic)
        if shut is not None:
            if now < shut.until_seconds:
                return self._refuse(shut.owner)
            del self._shut[topic]
        owner = self._owner_of(topic)
        if owner is None:
            within = self._each_other.allows(topic) and self._others.allows()
        else:
            within = self._each.allows(owner)
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


DEVICE_LIMIT = Limit(burst=1024, per_second=64)
"""Of one device. All that an outbox may hold, 64 MiB, travels in 683 messages, and a device sends
it again after ten seconds at the soonest."""
ENROLMENT_LIMIT = Limit(burst=1024, per_second=128)
"""Of everybody who has not enrolled: each request costs a look into the database."""
NEWCOMER_LIMIT = Limit(burst=4096, per_second=2048)
"""Of all devices together that a worker has not looked up: a look-up costs some 20 us, an open 50
times as much."""
_STRANGERS_A_TURN = 64
_SMALL_RECEIVE_MAXIMUM = 256
_MOST_TOPICS = 8192


def enrolment_limits(clock: Clock) -> TopicLimits:
    """Of the connection for what anybody may send. All who enrol write to one topic, which has all
    that there is for them."""
    return TopicLimits(
        lambda topic: None, DEVICE_LIMIT, ENROLMENT_LIMIT, clock, each_other=ENROLMENT_LIMIT
    )


@dataclass(frozen=True)
class Hears:
    """Which messages a process takes. Here: all of them, alone.

    Attributes:
        up: filters of the devices' topics; None for all.
        others: how much of topics that no device is known of.
        qos: of the devices' topics. With 0 the broker keeps nothing for each of many filters; what
            it drops on the way here has no receipt, and devices send it again.
        fleet: the fleet's own descriptor and presence, and enrolment requests.
        client: what its client ids begin with, where they stay the same over restarts: up to 20
            letters and digits.
    """

    up: tuple[str, ...] | None = None
    others: Limit = DEVICE_LIMIT
    qos: int = 1
    fleet: bool = True
    client: str = ""


class BrokerLinks:
    """Three connections, so that nobody's messages can stand in the way of another kind's.

    A broker keeps a queue for each connection, and what does not fit into it is dropped, also what
    it has acknowledged to the sender, and also its acknowledgements to us. Apart are therefore

    * what **devices** send, and what the broker shows of us (descriptor, presence, probe). Each
      topic has a limit of its own;
    * what **anybody** may send: enrolment requests;
    * what **we** send. Nothing comes on this connection but the broker's acknowledgements.

    ``nudge``: called when there is something to take, where another's :meth:`events` is waited for.

    To the service they are one link: :meth:`events` brings ``Connected`` when the devices' topics
    are subscribed to and ours can be sent, again where the broker turns out to take other packets
    than it seemed, and ``Disconnected`` when ours cannot be sent any more.
    """

    def __init__(
        self,
        shared: Shared,
        settings: LinkSettings,
        rngs: list[np.random.Generator],
        hears: Hears = Hears(),
        nudge: Callable[[], None] | None = None,
    ) -> None:
        broker, topics, clock = shared.settings.broker, shared.topics, shared.clock
        self.broker = str(broker.way)
        """Which it is, for people."""
        self._parse = lru_cache(maxsize=_MOST_TOPICS)(topics.parse)
        self._registry = shared.registry
        self._device_limits = TopicLimits(
            self._owner, DEVICE_LIMIT, hears.others, clock, self._crowded
        )
        self._enrolment_limit = enrolment_limits(clock)
        if broker.proxy is not None:
            settings = replace(settings, proxy=broker.proxy)
        link = partial(Link, broker.way, clock=clock, settings=settings)
        ids = [f"{hears.client}{kind}" if hears.client else None for kind in "dso"]
        self._devices = link(
            rng=rngs[0], admits=self._device_limits.admits, client_id=ids[0], on_event=nudge
        )
        self.nudge = nudge = nudge or self._devices.nudge
        """Lets :meth:`events` return, where it waits."""
        self._strangers = link(
            rng=rngs[1], admits=self._enrolment_limit.admits, on_event=nudge, client_id=ids[1]
        )
        self._own = link(rng=rngs[2], on_event=nudge, client_id=ids[2])
        up = (topics.up_filter(),) if hears.up is None else hears.up
        descriptor = topics.write(DescriptorTopic())
        self._needed = frozenset(up or (descriptor,))
        if hears.fleet:
            # First, so that another life's are heard before anything is announced.
            self._devices.subscribe(descriptor)
            self._devices.subscribe(topics.write(PresenceTopic()))
            self._strangers.subscribe(topics.write(EnrolRequestTopic()))
        for each in up:
            self._devices.subscribe(each, qos=hears.qos)
        self._started = (self._devices, self._own, *([self._strangers] if hears.fleet else ()))
        self._probe_topic = topics.write(ProbeTopic())
        self._devices.subscribe(self._probe_topic, qos=hears.qos)
        self._probe = LossProbe(self._send_probe, shared.random_bytes(16), clock)
        self._sizes = SizeProbe(self._send_probe, self._probe_topic, shared.random_bytes(16), clock)
        self._comes_back: bool | None = None  # what is sent to the probe's topic; None: not known
        self._granted: set[str] = set()
        self._accepted: Connected | None = None
        self._told_bytes: int | None = -1  # of the largest packet; -1: nothing yet
        self._said_small = False
        self._said_loss = False
        self.problem = ""
        """Why there is no connection, for people; of the last try. Empty where none failed."""

    @property
    def connected(self) -> bool:
        """Whether devices can be heard and answered."""
        return self._devices.connected and self._own.connected

    @property
    def packet_bytes(self) -> int | None:
        """The largest packet that the broker takes; None: any of ours."""
        return self._sizes.packet_bytes

    @property
    def lost(self) -> int:
        """Messages of our own that the broker acknowledged and did not deliver."""
        return self._probe.lost

    def start(self) -> None:
        for link in self._started:
            link.start()

    def stop(self, *, flush_seconds: float = 0.0) -> None:
        """Send what is queued for at most ``flush_seconds``, and end."""
        self._own.stop(flush_seconds=flush_seconds)
        self._devices.stop()
        self._strangers.stop()

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1
    ) -> Delivery:
        return self._own.publish(topic, payload, retain=retain, qos=qos)

    def publish_each(self, messages: Sequence[tuple[str, bytes]], *, qos: int) -> None:
        """Several at once; see :meth:`Link.publish_each`."""
        self._own.publish_each(messages, qos=qos)

    def events(self, *, most: int = 256, timeout_seconds: float | None = None) -> list[Event]:
        """What came, waiting for the first; at most ``most`` messages of devices, and a few more
        of strangers. Empty also when something happened that is of no interest here.
        """
        events: list[Event] = []
        came = self._devices.events(most=most, timeout_seconds=timeout_seconds)
        for event in came:
            self._of_devices(event, events)
        for event in self._strangers.events(most=_STRANGERS_A_TURN, timeout_seconds=0.0):
            self._of_strangers(event, events)
        for event in self._own.events(timeout_seconds=0.0):
            self._of_ours(event, events)
        accepted, told = self._accepted, self._told_bytes
        if accepted is not None and self._is_sized() and told != self.packet_bytes:
            self.problem = ""
            LogEvent.CONNECTED.log(broker=self.broker)
            self._tell_of_drops()
            self._device_limits.packets_of(self.packet_bytes or MAX_MESSAGE_BYTES)
            self._told_bytes = self.packet_bytes
            events.append(accepted)
        if self.connected and self._up_granted:
            self._probe.turn(behind=len(came) >= most)
            self._tell_of_losses()
        return events

    def take_refused(self) -> Counter[bytes]:
        """Messages beyond the limits since the last call, by device id; empty bytes for others."""
        return self._device_limits.take_refused() + self._enrolment_limit.take_refused()

    def _is_sized(self) -> bool:
        if not self._up_granted or self._comes_back is None:
            return False
        return self._sizes.turn(self._comes_back)

    @property
    def _up_granted(self) -> bool:
        return self._granted >= self._needed

    def _owner(self, topic: bytes) -> bytes | None:
        try:
            parsed = self._parse(topic.decode())
        except (WireError, UnicodeDecodeError):
            return None
        if isinstance(parsed, UpTopic):
            return self._registry.owner(parsed)
        return topic if isinstance(parsed, DescriptorTopic | PresenceTopic | ProbeTopic) else None

    def _crowded(self, topic: bytes) -> bool:
        return self._devices.crowded(topic.decode(errors="replace"))

    def _of_devices(self, event: Event, events: list[Event]) -> None:
        match event:
            case Message() if event.topic == self._probe_topic:
                self._probe.came(event.payload)
                self._sizes.came(event.payload)
            case Message():
                events.append(event)
            case Disconnected() | ConnectRefused():
                self._granted.clear()
                self._comes_back = None
                self._probe.interrupted()
                self.problem = event.detail
                self._tell_of(event, "devices cannot be heard")
            case Subscribed() | SubscribeRefused() if event.topic_filter == self._probe_topic:
                # Where it is refused nothing comes back, and nothing is judged.
                self._comes_back = isinstance(event, Subscribed)
            case Subscribed():
                self._granted.add(event.topic_filter)
                events.append(event)
            case Connected():
                return
            case _:
                events.append(event)

    def _of_strangers(self, event: Event, events: list[Event]) -> None:
        match event:
            case Connected():
                return
            case Disconnected() | ConnectRefused():
                self._tell_of(event, "nobody can enrol")
            case _:
                events.append(event)

    def _of_ours(self, event: Event, events: list[Event]) -> None:
        match event:
            case Connected():
                self._accepted, self._told_bytes = event, -1
                self._sizes.connected(event.limits)
                self._look_at(event.limits.receive_maximum)
            case Disconnected() | ConnectRefused():
                self._accepted = None
                self._probe.interrupted()
                self._sizes.interrupted()
                self.problem = event.detail
                LogEvent.DISCONNECTED.log(
                    broker=self.broker, problem=event.detail, retry_seconds=event.retry_seconds
                )
                events.append(event)
            case PublishRefused() if event.topic == self._probe_topic:
                return  # the broker's rules differ from ours: nothing is judged
            case _:
                events.append(event)

    def _tell_of(self, event: Disconnected | ConnectRefused, effect: str) -> None:
        # Without a broker all three fail, and our own says so.
        if self._own.connected:
            LogEvent.CONNECTION_ENDED.log(
                effect=effect,
                broker=self.broker,
                problem=event.detail,
                retry_seconds=event.retry_seconds,
            )

    def _look_at(self, receive_maximum: int) -> None:
        if receive_maximum >= _SMALL_RECEIVE_MAXIMUM or self._said_small:
            return
        self._said_small = True
        LogEvent.BROKER_NARROW.log(broker=self.broker, messages=receive_maximum)

    def _tell_of_drops(self) -> None:
        if self._sizes.drops:
            LogEvent.BROKER_DROPS_LARGE.log(
                broker=self.broker, bytes=self._sizes.packet_bytes or 0, wanted_bytes=_LARGEST_BYTES
            )

    def _tell_of_losses(self) -> None:
        if self._probe.lost and not self._said_loss:
            self._said_loss = True
            LogEvent.BROKER_DROPS.log(broker=self.broker)

    def _send_probe(self, payload: bytes) -> Delivery | None:
        try:
            return self._own.publish(self._probe_topic, payload)
        except LinkError:
            return None
