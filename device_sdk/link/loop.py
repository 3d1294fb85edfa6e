"""The link's thread: connects, reconnects, and moves what is queued."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from device_sdk.link.connection import Connection, ConnectionEnd, Dialling
from device_sdk.link.events import (
    TAKEN_OVER,
    Connected,
    ConnectRefused,
    Delivery,
    Disconnected,
    EventQueue,
    Message,
    Outcome,
    PublishRefused,
    ServerLimits,
    Stopped,
    Subscribed,
    SubscribeRefused,
    VersionChoice,
    settle,
)
from device_sdk.link.outbound import SendQueue, Subscriptions, refusal
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
