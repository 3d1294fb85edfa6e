"""The link to the broker: one background thread that connects, reconnects and moves messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from device_sdk.link.broker_url import BrokerWay, TlsFiles
from device_sdk.link.buffered_client import Admits
from device_sdk.link.connection import Dialling
from device_sdk.link.events import Delivery, Event, ServerLimits
from device_sdk.link.loop import LinkLoop
from device_sdk.link.outbound import LinkError
from device_sdk.link.proxy import proxy_for
from device_sdk.link.settings import LinkSettings

__all__ = ["Link", "LinkError"]


class Link:
    """A connection to a broker that is made again whenever it breaks.

    Args:
        way: to the broker, whose files are read at each dial; or its URL.
        rng: draws the client id and the back-off's jitter. Used on the link's thread only.
        clock: monotonic seconds.
        tls: with a URL, files for ``mqtts://`` and ``wss://``; the system's authorities when None.
        client_id: behind the way's prefix; a random one when None.
        settings: limits and times.
        admits: asked on the link's thread for the topic of each publication that arrives, before
            anything is done with it; what it refuses is acknowledged and dropped. None: all.
        on_event: called on the link's thread after each event; for whoever waits elsewhere.

    Sessions are clean: subscriptions are made anew at each connection, and nothing is expected of
    the broker's queues. All public methods may be called from any thread; ``events`` from one at a
    time. The thread starts with :meth:`start` and waits without polling while nothing happens.
    Raises ValueError for a bad URL, the proxy's too. Files that cannot be used are told by
    ``Disconnected``, and read again at the next dial.
    """

    def __init__(
        self,
        way: str | BrokerWay,
        *,
        rng: np.random.Generator,
        clock: Callable[[], float],
        tls: TlsFiles | None = None,
        client_id: str | None = None,
        settings: LinkSettings | None = None,
        admits: Admits | None = None,
        on_event: Callable[[], None] | None = None,
    ) -> None:
        if isinstance(way, str):
            way = BrokerWay.parse(way, tls=tls)
        # 22 letters and digits: within what every 3.1.1 broker must take.
        self.client_id = client_id if client_id is not None else rng.bytes(11).hex()
        settings = settings or LinkSettings()
        self._proxy = settings.proxy
        proxy = proxy_for(way.url, settings.proxy)
        dialling = Dialling(way, self.client_id, settings, clock, admits, proxy)
        self._loop = LinkLoop(dialling, rng, on_event)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises RuntimeError when it was started before."""
        with self._lock:
            if self._thread is not None or self._loop.stopping:
                raise RuntimeError("a link starts once; make a new one")
            self._thread = threading.Thread(target=self._loop.run, name="tessera-link", daemon=True)
            self._thread.start()

    def stop(self, *, flush_seconds: float = 0.0, timeout_seconds: float = 5.0) -> bool:
        """Stop: send what is queued for at most ``flush_seconds``, say goodbye, end the thread.

        Returns whether the thread ended within ``timeout_seconds``; one that hangs in a name
        look-up ends as soon as that does, and never keeps the process alive. May be called twice.
        """
        with self._lock:
            self._loop.stop(flush_seconds)
            thread = self._thread
        if thread is None:
            self._loop.close()
            return True
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def contested(self, value: bool) -> None:
        """Somebody else is known to connect with this client id, or not any more: a connection that
        ends meanwhile is made again after a long wait, whatever the broker says of its end."""
        self._loop.contested = value

    def redirect(self, way: BrokerWay) -> None:
        """Be connected there from now on, with the same client id and subscriptions; what is not
        sent yet goes there."""
        proxy = proxy_for(way.url, self._proxy)
        self._loop.redirect(replace(self._loop.way, broker=way, proxy=proxy))

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted the connection and it has not ended since."""
        return self._loop.limits is not None

    @property
    def limits(self) -> ServerLimits | None:
        """What the broker allows; None without a connection."""
        return self._loop.limits

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1
    ) -> Delivery:
        """Queue a publication; it is sent now or once there is a connection.

        Those of one QoS leave in order. At QoS 0 none waits for the broker's acknowledgements.
        A broker's acknowledgement says nothing about the other end. Raises :class:`LinkError`
        (``queue-full``, ``too-large``, ``stopped``), and ValueError for a topic that cannot be
        published to or a QoS other than 0 and 1.
        """
        (delivery,) = self.publish_each([(topic, payload)], retain=retain, qos=qos)
        return delivery

    def publish_each(
        self, messages: Sequence[tuple[str, bytes]], *, retain: bool = False, qos: int = 1
    ) -> list[Delivery]:
        """As :meth:`publish`, for several at once, each with its topic: the link's thread wakes up
        once. Where there is not room for all, the first of them are queued, and
        :class:`LinkError` says how many."""
        if qos not in (0, 1):
            raise ValueError(f"QoS {qos}; expected 0 or 1")
        for topic, _ in messages:
            if not topic or "+" in topic or "#" in topic or "\x00" in topic:
                raise ValueError("a topic to publish to is not empty and holds no wildcard")
            if len(topic) > 16_383 and len(topic.encode()) > 65_535:
                raise ValueError("a topic has at most 65,535 bytes")
        done = self._loop.done
        deliveries = [Delivery(topic, payload, qos, retain, done) for topic, payload in messages]
        try:
            self._loop.queue.put_each(deliveries)
        finally:
            self._loop.waker.wake()
        return deliveries

    def subscribe(self, topic_filter: str, *, qos: int = 1, optional: bool = False) -> None:
        """Subscribe now and at each later connection; ``Subscribed`` or a refusal reports it.

        What the broker refuses is asked for again, with growing waits, until it grants it. An
        ``optional`` one is a wish: where it is refused, or the broker hangs up on it, nothing is
        said of it, and the others go on without it.
        """
        if qos not in (0, 1) or not topic_filter:
            raise ValueError("a subscription needs a topic filter and a QoS of 0 or 1")
        self._loop.subscriptions.add(topic_filter, qos, optional=optional)
        self._loop.waker.wake()

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription. Messages on their way may still arrive."""
        if self._loop.subscriptions.remove(topic_filter):
            self._loop.waker.wake()

    def events(self, *, most: int = 256, timeout_seconds: float | None = None) -> list[Event]:
        """Up to ``most`` events in order, waiting for the first (None: for ever)."""
        return self._loop.events.take(most, timeout_seconds)

    def crowded(self, topic: str) -> bool:
        """Whether half of the messages that fit wait to be taken, several of them ``topic``'s."""
        return self._loop.events.crowded(topic)

    def nudge(self) -> None:
        """Let :meth:`events`, where it waits, return with what there is."""
        self._loop.events.nudge()
