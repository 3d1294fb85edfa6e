"""The link to the broker: one background thread that connects, reconnects and moves messages."""

from __future__ import annotations

import math
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from device_sdk.wire.backoff import Backoff
from device_sdk.wire.broker_url import BrokerUrl, TlsFiles, parse_broker_url
from device_sdk.wire.connection import Connection, End
from device_sdk.wire.event_queue import EventQueue
from device_sdk.wire.link_events import (
    Connected,
    ConnectRefused,
    Delivery,
    Disconnected,
    Event,
    Message,
    Outcome,
    PublishRefused,
    ServerLimits,
    Stopped,
    Subscribed,
    SubscribeRefused,
)
from device_sdk.wire.link_settings import LinkSettings
from device_sdk.wire.mqtt_version import VersionChoice
from device_sdk.wire.send_queue import LinkError, SendQueue, refusal

__all__ = ["Link", "LinkError"]

_FAILURE = 128
_VERSION_FAILURES = ("no-connack", "version", "timeout", "protocol")


class Link:
    """A connection to a broker that is made again whenever it breaks.

    Args:
        url: ``mqtt://`` or ``mqtts://``, see :func:`parse_broker_url`.
        rng: draws the client id and the back-off's jitter. Used on the link's thread only.
        clock: monotonic seconds.
        tls: files for ``mqtts://``; the system's authorities when None.
        client_id: a random one when None.
        settings: limits and times.

    Sessions are clean: subscriptions are made anew at each connection, and nothing is expected of
    the broker's queues. All public methods may be called from any thread; ``events`` from one at a
    time. The thread starts with :meth:`start` and waits without polling while nothing happens.
    Raises ValueError for a bad URL or TLS files that cannot be read.
    """

    def __init__(
        self,
        url: str | BrokerUrl,
        *,
        rng: np.random.Generator,
        clock: Callable[[], float],
        tls: TlsFiles | None = None,
        client_id: str | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        self._url = parse_broker_url(url) if isinstance(url, str) else url
        if tls is not None and not self._url.tls:
            raise ValueError("TLS files are given, but the URL starts with mqtt://; use mqtts://")
        self._tls: ssl.SSLContext | None = (tls or TlsFiles()).context() if self._url.tls else None
        self._settings = settings if settings is not None else LinkSettings()
        self._clock = clock
        self._backoff = Backoff(
            rng,
            first_seconds=self._settings.backoff_first_seconds,
            most_seconds=self._settings.backoff_most_seconds,
        )
        # 22 letters and digits: within what every 3.1.1 broker must take.
        self.client_id = client_id if client_id is not None else rng.bytes(11).hex()
        self._versions = VersionChoice()
        self._lock = threading.Lock()
        self._done = threading.Condition(threading.Lock())
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._awake = False
        self._queue = SendQueue(
            most_messages=self._settings.send_queue_messages,
            most_bytes=self._settings.send_queue_bytes,
        )
        self._filters: dict[str, int] = {}
        self._changes: deque[tuple[str, int | None]] = deque()
        self._events = EventQueue(
            most_messages=self._settings.event_queue_messages,
            most_bytes=self._settings.event_queue_bytes,
            on_room=self._wake,
        )
        self._in_flight: dict[int, tuple[Delivery, float]] = {}
        self._asked: dict[int, tuple[str, float]] = {}
        self._limits: ServerLimits | None = None
        self._never_accepted = True
        self._paused_seconds = -math.inf
        self._stopping = False
        self._flush_until_seconds = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises RuntimeError when it was started before."""
        with self._lock:
            if self._thread is not None or self._stopping:
                raise RuntimeError("a link starts once; make a new one")
            self._thread = threading.Thread(target=self._run, name="tessera-link", daemon=True)
            self._thread.start()

    def stop(self, *, flush_seconds: float = 0.0, timeout_seconds: float = 5.0) -> bool:
        """Stop: send what is queued for at most ``flush_seconds``, say goodbye, end the thread.

        Returns whether the thread ended within ``timeout_seconds``; one that hangs in a name
        look-up ends as soon as that does, and never keeps the process alive. May be called twice.
        """
        self._queue.close()
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._flush_until_seconds = self._clock() + flush_seconds
            thread = self._thread
        self._wake()
        if thread is None:
            self._close()
            return True
        thread.join(timeout_seconds)
        return not thread.is_alive()

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted the connection and it has not ended since."""
        return self._limits is not None

    @property
    def limits(self) -> ServerLimits | None:
        """What the broker allows; None without a connection."""
        return self._limits

    @property
    def dropped_events(self) -> int:
        """Notices (never messages) that were dropped because nobody took them."""
        return self._events.dropped

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1
    ) -> Delivery:
        """Queue a publication; it is sent in order, now or once there is a connection.

        A broker's acknowledgement says nothing about the other end. Raises :class:`LinkError`
        (``queue-full``, ``too-large``, ``stopped``), and ValueError for a topic that cannot be
        published to or a QoS other than 0 and 1.
        """
        if qos not in (0, 1):
            raise ValueError(f"QoS {qos}; expected 0 or 1")
        if not topic or "+" in topic or "#" in topic or "\x00" in topic:
            raise ValueError("a topic to publish to is not empty and holds no wildcard")
        if len(topic.encode()) > 65_535:
            raise ValueError("a topic has at most 65,535 bytes")
        delivery = Delivery(topic, payload, qos, retain, self._done)
        self._queue.put(delivery)
        self._wake()
        return delivery

    def subscribe(self, topic_filter: str, *, qos: int = 1) -> None:
        """Subscribe now and at each later connection; ``Subscribed`` or a refusal reports it."""
        if qos not in (0, 1) or not topic_filter:
            raise ValueError("a subscription needs a topic filter and a QoS of 0 or 1")
        with self._lock:
            self._filters[topic_filter] = qos
            if self._limits is not None:  # else it is among the filters when a connection comes
                self._changes.append((topic_filter, qos))
        self._wake()

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription. Messages on their way may still arrive."""
        with self._lock:
            if self._filters.pop(topic_filter, None) is None:
                return
            if self._limits is not None:
                self._changes.append((topic_filter, None))
        self._wake()

    def events(self, *, most: int = 256, timeout_seconds: float | None = None) -> list[Event]:
        """Up to ``most`` events in order, waiting for the first (None: for ever)."""
        return self._events.take(most, timeout_seconds)

    # What a Connection calls, on the link's thread.

    def arrived(self, message: Message) -> None:
        """A message came."""
        self._events.put(message)

    def acknowledged(self, mid: int, code: int, detail: str) -> None:
        """The broker answered a publication."""
        entry = self._in_flight.pop(mid, None)
        if entry is None:
            return
        if code < _FAILURE:
            self._settle([entry[0]], Outcome.ACKNOWLEDGED, "")
        else:
            self._settle([entry[0]], Outcome.REFUSED, detail)
            self._events.put(PublishRefused(entry[0].topic, code, detail))

    def granted(self, mid: int, code: int, detail: str) -> None:
        """The broker answered a subscription."""
        entry = self._asked.pop(mid, None)
        if entry is None:
            return
        if code < _FAILURE:
            self._events.put(Subscribed(entry[0], code))
        else:
            self._events.put(SubscribeRefused(entry[0], code, detail))

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                end = self._one_connection()
                if self._stopping:
                    break
                unsuited = end.reason in _VERSION_FAILURES and self._never_accepted
                if unsuited and self._versions.rejected():
                    continue
                retry_seconds = self._backoff.next_seconds()
                self._report(end, retry_seconds)
                self._sleep(retry_seconds)
        finally:
            self._close()

    def _one_connection(self) -> End:
        self._never_accepted = True
        connection = Connection(
            self._url,
            self._tls,
            self._settings,
            self._versions.current,
            self.client_id,
            self,
            self._clock,
        )
        opened_seconds = self._clock()
        try:
            connection.open()
            opened_seconds = self._clock()
            while connection.end is None:
                self._turn(connection, opened_seconds)
        except Exception as error:  # no failure of ours may end the thread
            connection.close(End("protocol", f"{type(error).__name__}: {error}"))
        finally:
            self._limits = None
            lost = [delivery for delivery, _ in self._in_flight.values()]
            self._in_flight.clear()
            self._asked.clear()
            self._settle(lost, Outcome.LOST, "the connection ended before the acknowledgement")
        if self._clock() - opened_seconds >= self._settings.settled_seconds:
            self._backoff.reset()
        end = connection.end or End("closed", "the connection ended")
        connection.close(end)
        return end

    def _turn(self, connection: Connection, opened_seconds: float) -> None:
        """One wait for the socket and all the work that it brought."""
        now = self._clock()
        paused = self._events.paused
        if paused:
            self._paused_seconds = now  # what we did not read, the broker does not owe
        if connection.limits is not None and self._limits is None:
            self._accept(connection, connection.limits)
        if self._limits is not None:
            self._send(connection, self._limits, now)
            connection.flush()
        if self._stopping and self._flushed(now):
            connection.close(End("stopped", "the link was stopped"))
            return
        deadline, end = self._deadline(connection, opened_seconds, paused)
        if now >= deadline:
            connection.close(end)
            return
        # paho sends its ping when called after the keep-alive: be there in time.
        ping = connection.last_received_seconds + self._keepalive_seconds(connection)
        until = min(deadline, ping if ping > now else now + 1.0)
        if self._stopping:
            until = min(until, self._flush_until_seconds)
        connection.step(until - now, self._wake_read, read=not paused)

    def _accept(self, connection: Connection, limits: ServerLimits) -> None:
        self._never_accepted = False
        self._versions.accepted()
        with self._lock:
            self._changes.clear()
            filters = list(self._filters.items())
            self._limits = limits
        self._events.put(Connected(self._versions.current, limits))
        for topic_filter, qos in filters:
            self._ask(connection, topic_filter, qos)

    def _send(self, connection: Connection, limits: ServerLimits, now: float) -> None:
        with self._lock:
            self._awake = False
            changes = list(self._changes)
            self._changes.clear()
        for topic_filter, qos in changes:
            if qos is None:
                connection.unsubscribe(topic_filter)
            else:
                self._ask(connection, topic_filter, qos)
        room = min(self._settings.in_flight, limits.receive_maximum) - len(self._in_flight)
        batch = self._queue.take(room)
        for index, delivery in enumerate(batch):
            why = refusal(delivery, limits)
            if why is not None:
                self._settle([delivery], Outcome.REFUSED, why)
                self._events.put(PublishRefused(delivery.topic, None, why))
                continue
            qos = min(delivery.qos, limits.maximum_qos)
            try:
                mid = connection.publish(delivery.topic, delivery.payload, qos, delivery.retain)
            except Exception:
                self._settle(batch[index:], Outcome.LOST, "the connection failed while sending")
                raise
            self._in_flight[mid] = (delivery, now)

    def _ask(self, connection: Connection, topic_filter: str, qos: int) -> None:
        self._asked[connection.subscribe(topic_filter, qos)] = (topic_filter, self._clock())

    def _deadline(
        self, connection: Connection, opened_seconds: float, paused: bool
    ) -> tuple[float, End]:
        """When the connection must be given up unless something moves, and what to say then."""
        settings = self._settings
        if connection.limits is None:
            patience = settings.connect_timeout_seconds
            if self._versions.probing:
                patience = min(patience, settings.version_probe_seconds)
            return opened_seconds + patience, End("timeout", "no CONNACK in time")
        silent = (
            connection.last_received_seconds
            + self._keepalive_seconds(connection)
            + settings.stall_seconds
        )
        if paused:
            return silent, End("consumer-stalled", "nobody took the events")
        silent = max(silent, self._paused_seconds + settings.stall_seconds)
        return min([*self._owed(), silent]), End(
            "stalled", "the broker owes an answer and sends none"
        )

    def _owed(self) -> list[float]:
        # Both are in the order of asking: the first entry is the oldest.
        oldest = [
            next(iter(waiting.values()))[1] for waiting in (self._in_flight, self._asked) if waiting
        ]
        return [max(since, self._paused_seconds) + self._settings.stall_seconds for since in oldest]

    def _keepalive_seconds(self, connection: Connection) -> float:
        theirs = connection.limits.keepalive_seconds if connection.limits is not None else None
        return float(theirs or self._settings.keepalive_seconds)

    def _flushed(self, now: float) -> bool:
        if now >= self._flush_until_seconds or self._limits is None:
            return True
        return not len(self._queue) and not self._in_flight

    def _report(self, end: End, retry_seconds: float) -> None:
        if end.reason == "refused" and end.code is not None:
            self._events.put(ConnectRefused(end.code, end.detail, retry_seconds))
        else:
            self._events.put(Disconnected(end.reason, end.detail, retry_seconds, end.code))

    def _settle(self, deliveries: list[Delivery], outcome: Outcome, detail: str) -> None:
        if not deliveries:
            return
        with self._done:
            for delivery in deliveries:
                delivery.detail = detail
                delivery.outcome = outcome
            self._done.notify_all()

    def _sleep(self, seconds: float) -> None:
        until = self._clock() + seconds
        while not self._stopping and (left := until - self._clock()) > 0:
            self._wake_read.settimeout(left)
            try:
                self._wake_read.recv(4096)
            except TimeoutError:
                break
            finally:
                self._wake_read.setblocking(False)

    def _wake(self) -> None:
        with self._lock:
            if self._awake and not self._stopping:
                return
            self._awake = True
        try:
            self._wake_write.send(b"w")
        except (BlockingIOError, OSError):
            return  # the buffer is full of wake-ups, or the link has ended

    def _close(self) -> None:
        with self._lock:
            self._stopping = True
        self._queue.close()
        waiting = self._queue.take(len(self._queue))
        self._settle(waiting, Outcome.DROPPED, "the link was stopped")
        self._events.put(Stopped())
        self._wake_read.close()
        self._wake_write.close()
