"""The link to the broker: one background thread that connects, reconnects and moves messages."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np

from device_sdk.link.broker_url import BrokerWay, TlsFiles
from device_sdk.link.buffered_client import Admits
from device_sdk.link.connection import Connection, ConnectionEnd, Dialling
from device_sdk.link.events import (
    TAKEN_OVER,
    Connected,
    ConnectRefused,
    Delivery,
    Disconnected,
    Event,
    EventQueue,
    LinkError,
    Message,
    Outcome,
    PublishRefused,
    SendQueue,
    ServerLimits,
    Stopped,
    Subscribed,
    SubscribeRefused,
    Subscriptions,
    VersionChoice,
    refusal,
    settle,
)
from device_sdk.link.proxy import proxy_for
from device_sdk.link.settings import LinkSettings
from device_sdk.system.clock import Backoff

# Wakes a thread that waits for sockets.


class WakeUp:
    """A pair of sockets: any thread writes a byte, the waiting one sees it beside its own socket.

    One byte is enough until the waiting thread has said, by :meth:`rearm`, that it looks at
    everything anew. The byte stays where it is until then: what came before is looked at, and what
    comes after writes another, so between the two nothing can be missed.
    """

    def __init__(self) -> None:
        self.socket, self._write = socket.socketpair()
        """To wait for, on the waiting thread only; :meth:`rearm` reads it."""
        self.socket.setblocking(False)
        self._write.setblocking(False)
        self._lock = threading.Lock()
        self._awake = False

    def wake(self, *, again: bool = False) -> None:
        """Wake the thread, from any thread; ``again``: though nobody has said ``rearm``."""
        with self._lock:
            if self._awake and not again:
                return
            self._awake = True
            try:
                self._write.send(b"w")
            except OSError:
                return  # the buffer is full of wake-ups, or the sockets are closed

    def rearm(self) -> None:
        """Call before the first look at anything: what comes after it wakes the thread again."""
        with self._lock:
            if not self._awake:
                return
            self._awake = False
            try:
                self.socket.recv(4096)
            except BlockingIOError:
                return  # it was read while the thread slept

    def sleep(self, seconds: float, clock: Callable[[], float], until: Callable[[], bool]) -> None:
        """Sleep on the waiting thread; ``until`` ends it early, asked after each wake-up."""
        end_seconds = clock() + seconds
        while not until() and (left := end_seconds - clock()) > 0:
            self.socket.settimeout(left)
            try:
                self.socket.recv(4096)
            except TimeoutError:
                break
            finally:
                self.socket.setblocking(False)

    def close(self) -> None:
        """Close both sockets. May be called twice."""
        self.socket.close()
        self._write.close()


_Open: TypeAlias = dict[int, tuple[Delivery, float]]
"""By packet id: what was handed over, and when."""
_FAILURE = 128
# There are brokers that end a connection for a filter that they do not grant.
_HUNG_UP = ("closed", "server")
_VERSION_FAILURES = ("no-connack", "version", "timeout", "protocol")


class LinkLoop:
    """Everything that happens on a link's thread; :class:`~device_sdk.link.link.Link` is its face.

    ``queue``, ``subscriptions``, ``events`` and ``waker`` are safe between threads, ``way`` and
    ``limits`` may be read from any (None without a connection), and ``done`` tells of publications'
    fates. All else belongs to the thread that calls :meth:`run`. ``rng`` draws the back-off's
    jitter. ``on_event``: see :class:`~device_sdk.link.link.Link`.
    """

    def __init__(
        self, way: Dialling, rng: np.random.Generator, on_event: Callable[[], None] | None
    ) -> None:
        self.way, self._settings, self._clock = way, way.settings, way.clock
        self._used = way  # by the connection of the moment
        settings = way.settings
        make_backoff = partial(
            Backoff,
            rng,
            first_seconds=settings.backoff_first_seconds,
            most_seconds=settings.backoff_most_seconds,
        )
        self._backoff = make_backoff()
        self._yields = Backoff(
            rng,
            first_seconds=settings.yield_seconds,
            most_seconds=max(settings.yield_seconds, settings.most_yield_seconds),
        )
        self.contested = False
        """Whether somebody else connects with our client id, as far as is known otherwise than by
        the broker's word. Set from any thread."""
        self.waker = WakeUp()
        self.done = threading.Condition(threading.Lock())
        self.subscriptions = Subscriptions(make_backoff)
        self.queue = SendQueue(
            most_messages=settings.send_queue_messages,
            most_bytes=settings.send_queue_bytes,
        )
        self.events = EventQueue(
            most_messages=settings.event_queue_messages,
            most_bytes=settings.event_queue_bytes,
            on_room=self.waker.wake,
            on_event=on_event,
        )
        self.limits: ServerLimits | None = None
        self._versions = VersionChoice()
        # By QoS. What needs no acknowledgement only waits until it is written.
        self._in_flight: tuple[_Open, _Open] = ({}, {})
        self._asked: dict[int, tuple[Sequence[str], float]] = {}
        self._never_accepted = True
        self._paused_seconds = self._acknowledged_seconds = -math.inf
        self._stopping = False
        self._flush_until_seconds = 0.0

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` was called, or the thread has ended."""
        return self._stopping

    def stop(self, flush_seconds: float) -> None:
        """End the loop, from any thread: queued publications have ``flush_seconds`` to leave.

        Only the first call's time counts.
        """
        self.queue.close()
        if not self._stopping:
            # In this order: the thread that sees the one must find the other.
            self._flush_until_seconds = self._clock() + flush_seconds
            self._stopping = True
        # A link that sleeps between two connections takes no notice of work, only of its end.
        self.waker.wake(again=True)

    def redirect(self, way: Dialling) -> None:
        """Connect that way from now on, at once, from any thread."""
        self.way = way
        self.waker.wake(again=True)

    # What a Connection calls.

    def arrived(self, messages: Sequence[Message]) -> None:
        """Messages came."""
        self.events.put_messages(messages)

    def written(self, mids: Sequence[int]) -> None:
        """The socket took publications at QoS 0."""
        gone = []
        for mid in mids:
            for waiting in self._in_flight:  # a broker may know no QoS 1
                if mid in waiting:
                    gone.append(waiting.pop(mid)[0])
        settle(gone, Outcome.ACKNOWLEDGED, "")

    def acknowledged(self, mid: int, code: int, detail: str) -> None:
        """The broker answered a publication."""
        entry = self._in_flight[1].pop(mid, None)
        if entry is None:
            return
        now, before = self._clock(), max(self._paused_seconds, self._acknowledged_seconds)
        entry[0].silent_seconds = now - max(entry[1], before)
        self._acknowledged_seconds = now
        if code < _FAILURE:
            settle([entry[0]], Outcome.ACKNOWLEDGED, "")
        else:
            entry[0].code = code
            settle([entry[0]], Outcome.REFUSED, detail)
            self.events.put(PublishRefused(entry[0].topic, code, detail))

    def granted(self, mid: int, answers: Sequence[tuple[int, str]]) -> None:
        """The broker answered subscriptions, in their order, each with a code and what it means.

        Raises ValueError where it answered more or fewer than it was asked for.
        """
        if mid not in self._asked:
            return
        filters, _ = self._asked[mid]
        if len(answers) != len(filters):
            raise ValueError(f"{len(answers)} answers to {len(filters)} subscriptions")
        del self._asked[mid]
        for topic_filter, (code, detail) in zip(filters, answers, strict=True):
            if code < _FAILURE:
                self.subscriptions.granted(topic_filter)
                self.events.put(Subscribed(topic_filter, code))
                continue
            retry_seconds = self.subscriptions.refused(topic_filter, self._clock())
            if retry_seconds is not None:
                self.events.put(SubscribeRefused(topic_filter, code, detail, retry_seconds))

    # The thread.

    def run(self) -> None:
        """Connect and reconnect until stopped; then :meth:`close`."""
        try:
            while not self._stopping:
                end = self._one_connection()
                if self._stopping:
                    break
                unsuited = end.reason in _VERSION_FAILURES and self._never_accepted
                if unsuited and self._versions.rejected():
                    continue
                retry_seconds = 0.0 if self._is_redirected() else self._retry_seconds(end)
                self._report(end, retry_seconds)
                self.waker.sleep(
                    retry_seconds, self._clock, lambda: self._stopping or self._is_redirected()
                )
        finally:
            self.close()

    def _retry_seconds(self, end: ConnectionEnd) -> float:
        """Whoever has our client id too, and took our place, has it for a while: else the two would
        throw each other out all the time."""
        retry_seconds = self._backoff.next_seconds()
        if end.code == TAKEN_OVER or self.contested:
            least = self._settings.yield_seconds / 2
            retry_seconds = max(retry_seconds, least, self._yields.next_seconds())
        return retry_seconds

    def _is_redirected(self) -> bool:
        return self.way is not self._used

    def _one_connection(self) -> ConnectionEnd:
        self._never_accepted = True
        if self._is_redirected():
            self._used, self._versions = self.way, VersionChoice()
        connection = Connection(self._used, self._versions.current, self)
        opened_seconds = self._clock()
        try:
            connection.open()
            opened_seconds = self._clock()
            while connection.end is None:
                self._turn(connection, opened_seconds)
        except Exception as error:  # no failure of ours may end the thread
            connection.close(ConnectionEnd("protocol", f"{type(error).__name__}: {error}"))
        finally:
            self.limits = None
            hung_up = connection.end is not None and connection.end.reason in _HUNG_UP
            asked = [each for filters, _ in self._asked.values() for each in filters]
            self.subscriptions.disconnected(asked if hung_up else ())
            lost = [delivery for each in self._in_flight for delivery, _ in each.values()]
            for each in self._in_flight:
                each.clear()
            self._asked.clear()
            settle(lost, Outcome.LOST, "the connection ended before the acknowledgement")
        if self._clock() - opened_seconds >= self._settings.settled_seconds:
            self._backoff.reset()
        end = connection.end or ConnectionEnd("closed", "the connection ended")
        connection.close(end)
        return end

    def _turn(self, connection: Connection, opened_seconds: float) -> None:
        """One wait for the socket and all the work that it brought."""
        self.waker.rearm()  # first: whatever happens from here on must end the wait below
        now = self._clock()
        paused = self.events.paused
        if paused:
            self._paused_seconds = now  # what we did not read, the broker does not owe
        if connection.limits is not None and self.limits is None:
            self._accept(connection, connection.limits)
        if self.limits is not None:
            self._send(connection, self.limits, now)
            connection.flush()
        if self._is_redirected():
            connection.close(ConnectionEnd("moved", "on the way to another broker"))
            return
        if self._stopping and self._flushed(now):
            connection.close(ConnectionEnd("stopped", "the link was stopped"))
            return
        deadline, end = self._deadline(connection, opened_seconds, paused)
        if now >= deadline:
            connection.close(end)
            return
        # paho sends its ping when called after the keep-alive: be there in time.
        ping = connection.last_received_seconds + self._keepalive_seconds(connection)
        until = min(deadline, ping if ping > now else now + 1.0, self.subscriptions.next_seconds())
        if self._stopping:
            until = min(until, self._flush_until_seconds)
        if self.limits is not None and self._can_write_more():
            until = now
        connection.step(until - now, self.waker.socket, read=not paused)

    def _accept(self, connection: Connection, limits: ServerLimits) -> None:
        self._never_accepted = False
        self._versions.accepted()
        filters = self.subscriptions.connected()
        self.limits = limits
        self.events.put(Connected(self._versions.current, limits))
        self._ask(connection, filters)

    def _send(self, connection: Connection, limits: ServerLimits, now: float) -> None:
        wanted: list[tuple[str, int]] = []
        for topic_filter, qos in self.subscriptions.take_changes(now):
            if qos is not None:
                wanted.append((topic_filter, qos))
                continue
            self._ask(connection, wanted)  # in the order of the changes
            wanted = []
            connection.unsubscribe(topic_filter)
        self._ask(connection, wanted)
        # The broker's receive maximum holds for what it acknowledges, and for nothing else.
        windows = (self._settings.in_flight, min(self._settings.in_flight, limits.receive_maximum))
        for qos, window in enumerate(windows):
            room = window - len(self._in_flight[qos])
            self._send_batch(connection, limits, self.queue.take(qos, room), now)

    def _send_batch(
        self, connection: Connection, limits: ServerLimits, batch: list[Delivery], now: float
    ) -> None:
        for index, delivery in enumerate(batch):
            why = refusal(delivery, limits)
            if why is not None:
                settle([delivery], Outcome.REFUSED, why)
                self.events.put(PublishRefused(delivery.topic, None, why))
                continue
            qos = min(delivery.qos, limits.maximum_qos)
            try:
                mid = connection.publish(delivery.topic, delivery.payload, qos, delivery.retain)
            except Exception:
                settle(batch[index:], Outcome.LOST, "the connection failed while sending")
                raise
            self._in_flight[delivery.qos][mid] = (delivery, now)

    def _can_write_more(self) -> bool:
        # No acknowledgement will come to say that there is room again.
        return self.queue.waiting(0) > 0 and len(self._in_flight[0]) < self._settings.in_flight

    def _ask(self, connection: Connection, filters: Sequence[tuple[str, int]]) -> None:
        most = self._settings.filters_in_packet
        for first in range(0, len(filters), most):
            some = filters[first : first + most]
            asked = tuple(topic_filter for topic_filter, _ in some)
            self._asked[connection.subscribe(some)] = (asked, self._clock())

    def _deadline(
        self, connection: Connection, opened_seconds: float, paused: bool
    ) -> tuple[float, ConnectionEnd]:
        """When the connection must be given up unless something moves, and what to say then."""
        settings = self._settings
        if connection.limits is None:
            patience = settings.connect_timeout_seconds
            if self._versions.probing:
                patience = min(patience, settings.version_probe_seconds)
            return opened_seconds + patience, ConnectionEnd("timeout", "no CONNACK in time")
        silent = (
            connection.last_received_seconds
            + self._keepalive_seconds(connection)
            + settings.stall_seconds
        )
        if paused:
            return silent, ConnectionEnd("consumer-stalled", "nobody took the events")
        silent = max(silent, self._paused_seconds + settings.stall_seconds)
        return min([*self._owed(), silent]), ConnectionEnd(
            "stalled", "the broker owes an answer and sends none"
        )

    def _owed(self) -> list[float]:
        # Each is in the order of asking: the first entry is the oldest.
        kinds = (*self._in_flight, self._asked)
        oldest = [next(iter(waiting.values()))[1] for waiting in kinds if waiting]
        return [max(since, self._paused_seconds) + self._settings.stall_seconds for since in oldest]

    def _keepalive_seconds(self, connection: Connection) -> float:
        theirs = connection.limits.keepalive_seconds if connection.limits is not None else None
        return float(theirs or self._settings.keepalive_seconds)

    def _flushed(self, now: float) -> bool:
        if now >= self._flush_until_seconds or self.limits is None:
            return True
        return not len(self.queue) and not any(self._in_flight)

    def _report(self, end: ConnectionEnd, retry_seconds: float) -> None:
        if end.reason == "refused" and end.code is not None:
            self.events.put(ConnectRefused(end.code, end.detail, retry_seconds))
        else:
            self.events.put(Disconnected(end.reason, end.detail, retry_seconds, end.code))

    def close(self) -> None:
        """After the loop, or in place of one that never ran: drop what is queued, say so."""
        self._stopping = True
        self.queue.close()
        waiting = [each for qos in (0, 1) for each in self.queue.take(qos, len(self.queue))]
        settle(waiting, Outcome.DROPPED, "the link was stopped")
        self.events.put(Stopped())
        self.waker.close()


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
