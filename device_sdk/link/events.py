"""What a link reports: typed events, and the fate of each publication."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from device_sdk.link.mqtt_version import MqttVersion


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

    ``reason`` is a slug: ``unreachable``, ``tls``, ``timeout``, ``no-connack``, ``version``,
    ``closed``, ``server`` (the broker said why), ``stalled``, ``consumer-stalled``, ``protocol``.
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
    """A publication that arrived; ``retained``: the broker had stored it before we subscribed."""

    topic: str
    payload: bytes
    retained: bool


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


class Delivery:
    """A publication on its way. ``outcome`` is None until its fate is known."""

    __slots__ = ("detail", "done", "outcome", "payload", "qos", "retain", "topic")

    def __init__(
        self, topic: str, payload: bytes, qos: int, retain: bool, done: threading.Condition
    ) -> None:
        self.topic = topic
        self.payload = payload
        self.qos = qos
        self.retain = retain
        self.outcome: Outcome | None = None
        self.detail = ""
        # One condition for all deliveries of a link: an object of its own for each would cost
        # more than the rest of a publication.
        self.done = done

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
