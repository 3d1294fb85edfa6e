"""Rounds of a cluster in one thread: devices seal updates, workers take them in, receipts come."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.cluster.coordinator import Coordinating, Crew, posts
from aggregator.cluster.orders import Orders
from aggregator.cluster.worker import WorkerParts
from aggregator.home import AggregatorHome
from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.serve.assembly import World, assemble
from aggregator.serve.outgoing import Outgoing
from aggregator.serve.service import Parts
from aggregator.store import Store
from aggregator.store.rows import DeviceRow, RoundRow
from aggregator.store.versions import pack_state
from aggregator.task.cluster import Cell, Cluster
from aggregator.task.file import read_task
from device_sdk.link.events import Event, Message
from device_sdk.wire.codec.message import MessageType, decode
from device_sdk.wire.publish.receipts import (
    Receipt,
    RecordType,
    UpdateIdentity,
    Verdict,
    update_digest,
    write_update,
)
from device_sdk.wire.publish.topics import DownTopic, Topics, UpTopic
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import DeviceCredential, SessionOpening
from device_sdk.wire.seal.placement import shard_of
from device_sdk.wire.seal.session import Session
from tests.fakes.homes import command

_TOPICS = Topics()
_TOGETHER = 100
"""So many messages wait for a worker's turn, on average."""
_RESTARTED = 0.05
_DEADLINE_SECONDS = 300.0
"""More than any round of a test has."""


class HeldLink:
    """What a worker needs of its links: who holds it puts messages in, and takes what was sent."""

    packet_bytes: int | None = None

    def __init__(self) -> None:
        self.came: deque[Event] = deque()
        self.sent: list[tuple[str, bytes]] = []

    def events(self, *, most: int, timeout_seconds: float) -> list[Event]:
        return [self.came.popleft() for _ in range(min(most, len(self.came)))]

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1) -> None:
        self.sent.append((topic, payload))

    def publish_each(self, messages: Sequence[tuple[str, bytes]], *, qos: int) -> None:
        self.sent.extend(messages)

    def take_refused(self) -> Counter[bytes]:
        return Counter()

    def stop(self) -> None:
        self.came.clear()


class Told:
    """Takes orders for workers that are made by hand."""

    def tend(self, revision: int, orders: Orders) -> None:
        self.orders = orders


class Device:
    """A device's end: its identity, and its session with the worker that serves it."""

    record = RecordType.UPDATE

    def __init__(self, number: int) -> None:
        name = hashlib.sha256(b"device %d" % number).digest()
        self.number, self.id = number, name[:16]
        self.shard = shard_of(self.id)
        self.up_topic = _TOPICS.write(UpTopic(self.shard, self.id))
        self.down_topic = _TOPICS.write(DownTopic(self.id))
        self._credential = DeviceCredential(
            self.id, Ed25519PrivateKey.from_private_bytes(name), name
        )
        self._counter = 0
        self._opening: SessionOpening | None = None
        self._session: Session | None = None
        self.awaited = b""
        """The digest of the update that waits for its receipt; empty for none."""

    def content(self, row: RoundRow, body: bytes) -> bytes:
        """Of the message that brings a body."""
        return body

    def row(self) -> DeviceRow:
        """As enrolment would write it."""
        key = self._credential.admission_key
        identity = self._credential.identity.public_key().public_bytes_raw()
        return DeviceRow(self.id, identity, self.id, key, self.shard, self.id, 0, 1)

    @property
    def asks(self) -> bool:
        """Whether it waits for a session."""
        return self._opening is not None

    def ask(self, parts: Parts) -> Message:
        """For a session."""
        self._counter += 1
        freshness = Freshness(parts.life.incarnation, self._counter)
        descriptor = parts.keys.current().descriptor
        self._session = None
        self._opening = SessionOpening(self._credential, descriptor, freshness, time.monotonic)
        return Message(self.up_topic, self._opening.message, False)

    def update(self, row: RoundRow, body: bytes) -> Message:
        """Sealed."""
        assert self._session is not None
        identity = UpdateIdentity(self.id, "default", row.generation, row.round)
        content = self.content(row, body)
        self.awaited = update_digest(identity, hashlib.sha256(content).digest())
        sealed = self._session.seal(self.record, write_update(identity, content))
        return Message(self.up_topic, sealed, False)

    def take(self, message: bytes) -> None:
        """What a worker sent."""
        if message[1] == MessageType.SESSION_REPLY:
            assert self._opening is not None
            self._session, self._opening = self._opening.accept(message, 0).session, None
            return
        assert self._session is not None
        received = self._session.open(message)
        if received.message_type == RecordType.RECEIPT:
            receipt = decode(Receipt, received.payload)
            assert (receipt.digest, receipt.verdict) == (self.awaited, Verdict.COUNTED)
            self.awaited = b""


Bodies = Sequence[Sequence[bytes]]
"""By round, and by device."""


@dataclass(frozen=True)
class Played:
    """SHA-256 of the method's state after each round, and of the model file in the end."""

    versions: tuple[str, ...]
    model_file: str


def play(
    home: AggregatorHome,
    workers: int,
    devices: Sequence[Device],
    bodies: Bodies,
    *,
    restarts: bool = False,
    alone: int = 0,
) -> Played:
    """A round of all devices for each of ``bodies``, and what comes of them. To round ``alone``
    one device comes, and the deadline ends it."""
    versions = []
    with closing(SealedRounds(home, devices, workers, np.random.default_rng(workers))) as playing:
        for number, each in enumerate(bodies, 1):
            coming = devices[:1] if number == alone else devices
            closed = playing.round(number, coming, each, restarts=restarts)
            carried = number - 1 == alone > 0
            assert closed.summary.participants == len(coming) + carried
            versions.append(playing.state())
    out = home.folder / "model.safetensors"
    assert command(home, "model", "--out", str(out)) == 0
    return Played(tuple(versions), hashlib.sha256(out.read_bytes()).hexdigest())


class SealedRounds:
    """``devices`` and ``workers`` of a home; ``chance`` decides who comes when, what is committed
    together, and who is restarted."""

    def __init__(
        self,
        home: AggregatorHome,
        devices: Sequence[Device],
        workers: int,
        chance: np.random.Generator,
    ) -> None:
        self._devices, self._chance = devices, chance
        self._by_topic = {each.down_topic: each for each in devices}
        with closing(home.open_store().database) as database, database.transaction():
            store = Store(database)
            store.facts.seed = 7
            for each in devices:
                store.devices.add(each.row())
        cluster, task = Cluster((Cell("", None, workers),)), read_task(home.task_file)
        self._now_seconds = 0.0
        self.parts = assemble(
            home, home.open_store(), task, self._world(0), role=Coordinating(cluster)
        )
        told = Told()
        Crew(told, home, self.parts).tend()
        self._orders = told.orders
        self._posts = posts(home, self.parts.store, cluster, task.fleet)
        self.crew = [self._started(slot) for slot in range(workers)]
        self._known: dict[bytes, WorkerParts] = {}  # by device, who has its session

    def round(
        self,
        number: int,
        coming: Collection[Device],
        bodies: Sequence[bytes],
        *,
        restarts: bool,
        late: Sequence[tuple[Device, RoundRow, bytes]] = (),
    ) -> RoundClosed:
        """A round from its opening to its close: these devices send until they have receipts, after
        those that are ``late`` with a body of an earlier round."""
        rounds = self.parts.tasks.first.rounds
        opened = rounds.tick()
        assert isinstance(opened, RoundOpened) and opened.row.round == number
        for each in self.crew:
            each.look()
        own = [(each, opened.row, bodies[each.number]) for each in coming]
        for sent in (late, own):
            self._deliver(sent, restarts=restarts)
        closed = rounds.tick()
        if closed is None:  # somebody is waited for
            self._now_seconds += _DEADLINE_SECONDS
            closed = rounds.tick()
        assert isinstance(closed, RoundClosed)
        return closed

    def _deliver(self, sent: Sequence[tuple[Device, RoundRow, bytes]], *, restarts: bool) -> None:
        waiting = list(sent)
        self._open_sessions([device for device, _, _ in waiting])
        while waiting:
            for place in self._chance.permutation(len(waiting)).tolist():
                if restarts and self._chance.random() < _RESTARTED:
                    self._restart(int(self._chance.integers(len(self.crew))))
                device, row, body = waiting[place]
                self._open_sessions([device])
                worker = self._worker_of(device)
                worker.link.came.append(device.update(row, body))
                if self._chance.random() < 1 / _TOGETHER:
                    self._turn(worker)
            for worker in self.crew:
                self._turn(worker)
                worker.commit()
                self._hear(worker)
            waiting = [each for each in waiting if each[0].awaited]

    def state(self) -> str:
        """The SHA-256 of the method's state."""
        return hashlib.sha256(pack_state(self.parts.tasks.first.aggregation.state())).hexdigest()

    def close(self) -> None:
        for each in self.crew:
            each.close()
        self.parts.store.database.close()

    def _world(self, seed: int) -> World:
        return World(
            lambda: self._now_seconds,
            time.time,
            np.random.default_rng(seed),
            os.urandom,
            lambda seconds: None,
        )

    def _started(self, slot: int) -> WorkerParts:
        post = self._posts[slot]
        store = post.open_store()
        epoch = store.workers.start(slot, "", "", "")
        made = WorkerParts(post, store, self._world(slot), epoch, self._orders)
        made.link = HeldLink()
        made._outgoing = Outgoing(made.link, store.retained)
        made.take(self._orders)
        return made

    def _restart(self, slot: int) -> None:
        self.crew[slot].close()  # with what it did not commit, and all its sessions
        self.crew[slot] = self._started(slot)
        self.crew[slot].look()

    def _worker_of(self, device: Device) -> WorkerParts:
        return self.crew[device.shard % len(self.crew)]

    def _open_sessions(self, devices: Sequence[Device]) -> None:
        """Of those whose worker has none."""
        asking = []
        for device in devices:
            worker = self._worker_of(device)
            if self._known.get(device.id) is not worker:
                self._known[device.id] = worker
                worker.link.came.append(device.ask(self.parts))
                asking.append(device)
        while asking:
            for worker in dict.fromkeys(map(self._worker_of, asking)):
                self._turn(worker)
            asking = [device for device in asking if device.asks]

    def _turn(self, worker: WorkerParts) -> None:
        """At least one, and until it has taken all that came."""
        while True:
            self._now_seconds += self._chance.uniform(0.0, 0.02)
            worker.turn()
            if not worker.link.came:
                break
        self._hear(worker)

    def _hear(self, worker: WorkerParts) -> None:
        sent, worker.link.sent = worker.link.sent, []
        for topic, payload in sent:
            self._by_topic[topic].take(payload)
