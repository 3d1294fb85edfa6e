"""A broker whose messages move only when a test says so: it can do what a hostile one could."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from paho.mqtt.client import topic_matches_sub

from device_sdk.link.events import (
    Connected,
    Delivery,
    Disconnected,
    Event,
    Message,
    MqttVersion,
    Outcome,
    ServerLimits,
)

AGGREGATOR = "aggregator"
# The same few thousand pairs come again and again.
_matches = lru_cache(maxsize=1 << 16)(topic_matches_sub)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A publication on its way to one client."""

    to: str
    topic: str
    payload: bytes
    retained: bool


class SimulatedBroker:
    """Retained messages, subscriptions, and ``under_way``: what was accepted and not delivered.

    ``seen`` has every publication ever made, as the broker's owner would see them.
    """

    def __init__(self) -> None:
        self.retained: dict[str, bytes] = {}
        self.under_way: list[Parcel] = []
        self.seen: list[tuple[str, bytes]] = []
        self._filters: dict[str, set[str]] = {}

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Take a publication; an empty retained one clears its topic."""
        self.seen.append((topic, payload))
        if retain and payload:
            self.retained[topic] = payload
        elif retain:
            self.retained.pop(topic, None)
        for client, filters in self._filters.items():
            if any(_matches(each, topic) for each in filters):
                self.under_way.append(Parcel(client, topic, payload, False))

    def subscribe(self, client: str, topic_filter: str) -> None:
        """Subscribe, and send what is retained."""
        self._filters.setdefault(client, set()).add(topic_filter)
        for topic, payload in self.retained.items():
            if _matches(topic_filter, topic):
                self.under_way.append(Parcel(client, topic, payload, True))

    def unsubscribe(self, client: str, topic_filter: str) -> None:
        """End a subscription."""
        self._filters.get(client, set()).discard(topic_filter)

    def forget(self, client: str) -> None:
        """The client's connection is gone, and what was on its way to it."""
        self._filters.pop(client, None)
        self.under_way = [parcel for parcel in self.under_way if parcel.to != client]

    def restart(self) -> None:
        """All is forgotten, as by a broker without persistence."""
        self.retained.clear()
        self._filters.clear()
        self.under_way.clear()


class StandInLink:
    """What the service needs of its links, on a simulated broker. Never waits."""

    lost = 0
    broker = "a simulated broker"
    packet_bytes: int | None = None
    problem = ""

    def __init__(self, broker: SimulatedBroker, filters: tuple[str, ...]) -> None:
        self._broker = broker
        self._filters = filters
        self._events: deque[Event] = deque()
        self._done = threading.Condition()
        self.connected = False

    def connect(self) -> None:
        """Connect and subscribe."""
        self.connected = True
        self._events.append(Connected(MqttVersion.V311, ServerLimits()))
        for each in self._filters:
            self._broker.subscribe(AGGREGATOR, each)

    def disconnect(self) -> None:
        """The connection is lost."""
        self.connected = False
        self._broker.forget(AGGREGATOR)
        self._events.append(Disconnected("timeout", "simulated", 1.0))

    def deliver(self, parcel: Parcel) -> None:
        """Hand a publication over."""
        self._events.append(Message(parcel.topic, parcel.payload, parcel.retained))

    def events(self, most: int = 1 << 30, timeout_seconds: float | None = None) -> list[Event]:
        """See :class:`~device_sdk.link.link.Link`."""
        return [self._events.popleft() for _ in range(min(most, len(self._events)))]

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1
    ) -> Delivery:
        """See :class:`~device_sdk.link.link.Link`; acknowledged at once."""
        if self.connected:
            self._broker.publish(topic, payload, retain=retain)
        delivery = Delivery(topic, payload, qos, retain, self._done)
        delivery.outcome = Outcome.ACKNOWLEDGED
        return delivery

    def publish_each(self, messages: Sequence[tuple[str, bytes]], *, qos: int) -> None:
        """See :class:`~aggregator.serve.broker_links.BrokerLinks`."""
        for topic, payload in messages:
            self.publish(topic, payload, qos=qos)

    def take_refused(self) -> Counter[bytes]:
        """See :class:`~aggregator.serve.broker_links.BrokerLinks`."""
        return Counter()

    def stop(self, *, flush_seconds: float = 0.0, timeout_seconds: float = 5.0) -> bool:
        """See :class:`~device_sdk.link.link.Link`."""
        return True
