"""Connections to several brokers, to which the same is said: a coordinator's to every cell's, and
those of a fleet that moves from one to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aggregator.serve.broker_links import BrokerLinks, Hears
from aggregator.shared import Shared
from device_sdk.link.broker_url import BrokerWay
from device_sdk.link.events import (
    ConnectRefused,
    Delivery,
    Disconnected,
    Event,
    LinkError,
    Message,
    Outcome,
)
from device_sdk.link.settings import LinkSettings


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
