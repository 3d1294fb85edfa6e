"""Many virtual devices on one thread, each with a connection of its own or over a few.

Each device has what a real one has: its identity, its own session, its handle and its shard's
topics; messages are sealed and receipts opened one by one. Where they share connections, what the
broker has to do for one is not in what is measured: :mod:`benchmarks.cluster.connections` measures
that. What is not answered is sent again
after the waits of :class:`~device_sdk.world.Pace`, and a session that nobody holds is replaced when
the aggregator says, as devices do.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.aggregator.fleet import BenchDevice
from benchmarks.aggregator.mqtt_client import MiniClient
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, decode
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.receipts import (
    Receipt,
    RecordType,
    UpdateIdentity,
    Verdict,
    update_digest,
    write_update,
)
from device_sdk.wire.publish.topics import DownTopic, ManifestTopic, PresenceTopic, Topics
from device_sdk.wire.seal.announcement import Presence, read_announcement
from device_sdk.wire.seal.broadcast import (
    GroupKey,
    derive_broadcast_keys,
    find_group_key,
    open_manifest,
    read_manifest_label,
)
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import DeviceCredential, SessionOpening, read_no_session
from device_sdk.wire.seal.session import Session
from device_sdk.wire.seal.signature import public_key
from device_sdk.world import Pace

_STANDSTILL_SECONDS = 240.0
_LOOK_SECONDS = 0.25
_OPENS = 1000
_FORGED_COUNTER = 2**40
_PACE = Pace()


class Announced:
    """What the aggregator tells everybody, as devices of the task ``default`` read it."""

    def __init__(self, topics: Topics, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._presence_topic = topics.write(PresenceTopic())
        self._manifest_topic = topics.write(ManifestTopic("default", "all"))
        self._group_keys: tuple[GroupKey, ...] = ()
        self._sealed = b""
        self.incarnation = b""
        self.manifest: RoundManifest | None = None

    @property
    def topics(self) -> tuple[str, str]:
        """Where it is told."""
        return self._manifest_topic, self._presence_topic

    def hear(self, topic: str, payload: bytes) -> None:
        """What came on one of them."""
        if topic == self._presence_topic:
            self.incarnation = read_announcement(Presence, payload, self._descriptor).incarnation
        elif payload:
            self._sealed = payload
            self._read()

    def learn(self, group_keys: tuple[GroupKey, ...]) -> None:
        """What a session's reply tells; manifests can be read with them."""
        if group_keys != self._group_keys:
            self._group_keys = group_keys
            self._read()

    def _read(self) -> None:
        if not self._group_keys or not self._sealed:
            return
        label = read_manifest_label(self._sealed)
        key = find_group_key(self._group_keys, label.epoch)
        keys = derive_broadcast_keys(key, label.broadcast_id, "default", "all")
        signing = public_key(self._descriptor.signing)
        self.manifest = decode(RoundManifest, open_manifest(self._sealed, keys, signing))


class _Virtual:
    """A device's end. ``digest``: of the update that waits for its receipt; empty for none."""

    __slots__ = (
        *("device", "client", "up_topic", "body", "session", "opening", "counter", "digest"),
        *("message", "due_seconds", "sent_seconds", "sends", "reopens"),
    )

    def __init__(self, device: BenchDevice, client: MiniClient, up_topic: str, body: bytes) -> None:
        self.device, self.client, self.up_topic, self.body = device, client, up_topic, body
        self.session: Session | None = None
        self.opening: SessionOpening | None = None
        self.counter = 0
        self.digest = b""
        self.message = b""
        self.due_seconds = self.sent_seconds = 0.0
        self.sends = 0
        self.reopens = False


@dataclass(frozen=True)
class RoundSeen:
    """A round, as the devices see it.

    Attributes:
        round: its number.
        seconds: from the first update that was sent to the last receipt.
        latencies: seconds from an update to its receipt, for each.
        opened_at: seconds after the first update at which devices had another session.
        resent: messages that were sent again for want of an answer.
        reopened: seconds after the first update to the receipt, of devices that had to open another
            session.
    """

    round: int
    seconds: float
    latencies: tuple[float, ...]
    opened_at: tuple[float, ...]
    resent: int
    reopened: tuple[float, ...]


class Load:
    """All devices' ends.

    Args:
        port: the broker's.
        devices: enrolled ones.
        bodies: of their updates, dealt round.
        descriptor: the aggregator's.
        connections: that the devices share; None for one each, under the device's own name.
        window: so many devices wait for an answer at a time, beside all those whose session was
            lost; None for all.
        account: the devices' user and password at the broker, if it asks for any.
    """

    def __init__(
        self,
        port: int,
        devices: Sequence[BenchDevice],
        bodies: Sequence[bytes],
        descriptor: Descriptor,
        *,
        connections: int | None = None,
        window: int | None = None,
        account: tuple[str, str] | None = None,
    ) -> None:
        self._descriptor, self._window = descriptor, window or len(devices)
        topics = Topics()
        self._announced = Announced(topics, descriptor)
        names = [device.handle.hex() for device in devices]
        if connections is not None:
            names = [f"bench-{place}" for place in range(connections)]
        self._clients = [MiniClient(port, name, account) for name in names]
        self._by_topic: dict[str, _Virtual] = {}
        for each in self._announced.topics:
            self._clients[0].subscribe(each)
        for place, device in enumerate(devices):
            client = self._clients[place % len(self._clients)]
            down = topics.write(DownTopic(device.handle))
            client.subscribe(down)
            body = bodies[place % len(bodies)]
            self._by_topic[down] = _Virtual(device, client, device.up_topic, body)
        self._fleet = list(self._by_topic.values())
        self._selector = selectors.DefaultSelector()
        for client in self._clients:
            self._selector.register(client.socket, selectors.EVENT_READ, client)
        self._waiting: set[_Virtual] = set()
        self._lost: set[_Virtual] = set()  # their session, while they wait for an answer
        self._later: list[tuple[float, int, _Virtual]] = []  # who is to open a session, and when
        self._rng = np.random.default_rng(6)
        self._round = 0
        self.resent = 0
        self._latencies: list[float] = []
        self._opened: list[float] = []
        self._reopened: list[float] = []
        self._manifest: RoundManifest | None = None

    @property
    def incarnation(self) -> bytes:
        """The aggregator's life, once it was heard of."""
        return self._announced.incarnation

    def forged_open(self, device: BenchDevice) -> bytes:
        """An open that is right in all but its admission tag: what anybody could make up."""
        key = self._rng.bytes(len(device.credential.admission_key))
        credential = replace(device.credential, admission_key=key)
        return self._opening(credential, _FORGED_COUNTER).message

    def run(self, updates: int) -> float:
        """Rounds, until so many updates or a few more have their receipts; the seconds it took.
        Updates are sealed as they are sent."""
        began = time.perf_counter()
        for _ in range(-(-updates // len(self._fleet))):
            self._begin_round()
            self._drive(self._fleet, self._seal_and_send, self._window)
        return time.perf_counter() - began

    def open_sessions(self) -> float:
        """One session each; the seconds it took from the first open to the last reply."""
        self._until(lambda: bool(self._announced.incarnation))
        began = time.monotonic()
        self._drive(self._fleet, self._open, min(self._window, _OPENS))
        return time.monotonic() - began

    def round(self, on_sealed: Callable[[], None] = lambda: None, alone: int = 0) -> RoundSeen:
        """Wait for the next round; each device sends its update and waits for the receipt.

        ``on_sealed`` is called when all updates are sealed, before the first is sent. The first
        ``alone`` devices send one after the other, each when the one before has its receipt.
        """
        manifest = self._begin_round()
        for one in self._fleet:
            self._seal(one)
        on_sealed()
        self._latencies, self._opened, self._reopened = [], [], []
        resent = self.resent
        began = time.monotonic()
        self._drive(self._fleet[:alone], self._send, 1)
        self._drive(self._fleet[alone:], self._send, self._window)
        ended = time.monotonic()
        return RoundSeen(
            manifest.round,
            ended - began,
            tuple(self._latencies),
            tuple(at - began for at in self._opened),
            self.resent - resent,
            tuple(at - began for at in self._reopened),
        )

    def close(self) -> None:
        """Disconnect."""
        self._selector.close()
        for client in self._clients:
            client.socket.close()

    def _begin_round(self) -> RoundManifest:
        self._until(self._next_round_is_open)
        assert self._announced.manifest is not None
        self._manifest = self._announced.manifest
        self._round = self._manifest.round
        return self._manifest

    def _next_round_is_open(self) -> bool:
        manifest = self._announced.manifest
        return manifest is not None and manifest.round > self._round

    def _until(self, there: Callable[[], bool]) -> None:
        until = time.monotonic() + _STANDSTILL_SECONDS
        self._hear(self._clients[0])
        while not there():
            self._turn(0.1)
            if time.monotonic() > until:
                raise TimeoutError("nothing that was waited for came from the aggregator")

    def _drive(
        self, fleet: Sequence[_Virtual], act: Callable[[_Virtual], None], window: int
    ) -> None:
        """Let each act, and wait until none waits for an answer."""
        left = deque(fleet)
        seen, until, look_at = -1, 0.0, 0.0
        while left or self._waiting or self._lost:
            now = time.monotonic()
            while left and len(self._waiting) < window:
                act(left.popleft())
                if len(left) % 64 == 0:
                    break  # what came is heard in between
            now_left = len(left) + len(self._waiting) + len(self._lost)
            if now_left != seen:
                # However slow the machine is: only a standstill is a failure.
                seen, until = now_left, now + _STANDSTILL_SECONDS
            elif now > until:
                raise TimeoutError(f"{seen} devices wait for an answer, and none comes")
            if now > look_at:
                look_at = now + _LOOK_SECONDS
                waiting = self._waiting | self._lost
                for one in [one for one in waiting if now > one.due_seconds]:
                    self._send_again(one)
                    self.resent += 1
            while self._later and self._later[0][0] <= now:
                self._open(heapq.heappop(self._later)[2])
            self._turn(0.0 if left and len(self._waiting) < window else 0.02)

    def _open(self, one: _Virtual) -> None:
        one.counter += 1
        one.session = None
        one.opening = self._opening(one.device.credential, one.counter)
        one.message = one.opening.message
        self._publish(one)

    def _opening(self, credential: DeviceCredential, counter: int) -> SessionOpening:
        freshness = Freshness(self.incarnation, counter)
        return SessionOpening(credential, self._descriptor, freshness, time.monotonic)

    def _seal_and_send(self, one: _Virtual) -> None:
        self._seal(one)
        self._send(one)

    def _seal(self, one: _Virtual) -> None:
        """The round's update, under the session that there is."""
        assert self._manifest is not None and one.session is not None
        device_id = one.device.credential.device_id
        manifest = self._manifest
        identity = UpdateIdentity(device_id, "default", manifest.generation, manifest.round)
        one.digest = update_digest(identity, hashlib.sha256(one.body).digest())
        one.message = one.session.seal(RecordType.UPDATE, write_update(identity, one.body))
        one.sends = 0

    def _send(self, one: _Virtual) -> None:
        one.sent_seconds = time.monotonic()
        self._publish(one)

    def _send_again(self, one: _Virtual) -> None:
        if one.sends % _PACE.unanswered_sends:
            self._publish(one)
        elif one.opening is not None:
            self._open(one)
        else:
            self._open_after(one, self._backoff(_PACE.reopen_seconds, 0))

    def _backoff(self, first_seconds: float, tries: int) -> float:
        most = min(_PACE.most_seconds, first_seconds * 2.0**tries)
        return float(self._rng.uniform(most / 10, most))

    def _wait_seconds(self, one: _Virtual) -> float:
        """Until what was just sent is sent again."""
        if one.opening is not None:
            wait = self._backoff(_PACE.answer_seconds, one.sends)
            return max(_PACE.answer_seconds / 2, wait)
        if not one.sends:
            return _PACE.repeat_seconds * float(self._rng.uniform(1.0, 1.5))
        return max(_PACE.answer_seconds, self._backoff(_PACE.answer_seconds, one.sends - 1))

    def _open_after(self, one: _Virtual, seconds: float) -> None:
        at = time.monotonic() + seconds
        one.session, one.due_seconds, one.sends, one.reopens = None, math.inf, 0, True
        self._waiting.discard(one)
        self._lost.add(one)
        heapq.heappush(self._later, (at, id(one), one))

    def _publish(self, one: _Virtual) -> None:
        one.due_seconds = time.monotonic() + self._wait_seconds(one)
        one.sends += 1
        if one not in self._lost:
            self._waiting.add(one)
        one.client.publish(one.up_topic, one.message)

    def _turn(self, timeout_seconds: float) -> None:
        for key, _ in self._selector.select(timeout_seconds):
            self._hear(key.data)

    def _hear(self, client: MiniClient) -> None:
        for topic, payload in client.received():
            one = self._by_topic.get(topic)
            if one is None:
                self._announced.hear(topic, payload)
            elif payload[1] == MessageType.SESSION_REPLY:
                self._take_reply(one, payload)
            elif payload[1] == MessageType.NO_SESSION:
                self._take_denial(one, payload)
            elif one.session is not None and payload[4:12] == one.session.session_id:
                self._take_record(one, payload)

    def _take_reply(self, one: _Virtual, payload: bytes) -> None:
        if one.opening is None:
            return  # the same reply, to an open that was sent twice
        try:
            opened = one.opening.accept(payload, 0)
        except WireError:
            return  # it answers an earlier open
        one.session, one.opening = opened.session, None
        self._announced.learn(opened.group_keys)
        self._opened.append(time.monotonic())
        if one.digest:
            self._seal(one)
            self._publish(one)
        else:
            self._waiting.discard(one)
            self._lost.discard(one)

    def _take_denial(self, one: _Virtual, payload: bytes) -> None:
        denial = read_no_session(payload)
        if one.session is not None and denial.session_id == one.session.session_id:
            soon = self._backoff(_PACE.renew_seconds, 0)
            self._open_after(one, max(soon, denial.wait_seconds))

    def _take_record(self, one: _Virtual, payload: bytes) -> None:
        assert one.session is not None
        received = one.session.open(payload)
        if received.message_type != RecordType.RECEIPT:
            return
        receipt = decode(Receipt, received.payload)
        if receipt.digest != one.digest:
            return
        if receipt.verdict is not Verdict.COUNTED:
            raise RuntimeError(f"an update was not counted: {receipt}")
        one.digest = b""
        self._waiting.discard(one)
        if one.reopens:
            self._reopened.append(time.monotonic())
            self._lost.discard(one)
            one.reopens = False
        self._latencies.append(time.monotonic() - one.sent_seconds)


def spread_by_second(moments: Sequence[float]) -> list[int]:
    """How many fell into each second from 0 on."""
    if not moments:
        return []
    return [int(count) for count in np.bincount(np.asarray(moments, np.int64))]
