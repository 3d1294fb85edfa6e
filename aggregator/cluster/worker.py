"""A worker: takes in what the devices of its shards send, and answers after the commit."""

from __future__ import annotations

import hashlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from aggregator.clock import steady_clock
from aggregator.cluster.follower import RoundFollower, ShareKeeper
from aggregator.cluster.orders import Orders, Post, ServedTask, keyring_of
from aggregator.errors import StoreAway
from aggregator.events import LogEvent, about
from aggregator.keys.registry import HeldRegistry, revoke
from aggregator.refusals import Refusals
from aggregator.rounds.evaluator import Evaluator
from aggregator.rounds.ingest import Inbox, Ingest, Repeats, Settled
from aggregator.rounds.model_parts import ModelParts
from aggregator.serve.assembly import Bounds, World
from aggregator.serve.broker_links import NEWCOMER_LIMIT, Hears, links_to
from aggregator.serve.outgoing import Outgoing, answer_updates
from aggregator.serve.standings import Placements, Standings
from aggregator.serve.uplink import Answer, Arrived, Left, Refusal, Uplink
from aggregator.shared import Shared, TaskShared
from aggregator.store import STORE_FAILURES, Store
from aggregator.store.cluster import Deposed, GrantedCounters, RoundOver
from aggregator.task.cluster import Cluster
from aggregator.task.file import Task
from device_sdk.link.events import (
    Connected,
    ConnectRefused,
    Disconnected,
    Event,
    Message,
    Subscribed,
    SubscribeRefused,
)
from device_sdk.system.version import __version__
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.chunks import Reassembler
from device_sdk.wire.publish.topics import Topics
from device_sdk.wire.seal.announcement import Presence, new_presence
from device_sdk.wire.seal.broadcast import MOST_KEYS, GroupKey
from device_sdk.wire.seal.freshness import Freshness, FreshnessMarks
from device_sdk.wire.seal.handshake import MAX_OPEN_BYTES
from device_sdk.wire.seal.keys import RandomBytes
from device_sdk.wire.seal.placement import SHARDS, Placement, shard_of
from device_sdk.wire.seal.session_table import SessionTable

# A life that outlasts its processes: what was granted in it is in the store before it is told.


class StoredMarks(FreshnessMarks):
    """Marks that other processes see: :meth:`save` comes before any answer leaves."""

    def __init__(self, incarnation: bytes, granted: GrantedCounters) -> None:
        super().__init__(incarnation)
        self._granted = granted
        self._unsaved: dict[bytes, int] = {}

    def learn(self, senders: Sequence[bytes]) -> None:
        """Read at once what is known of senders who are about to ask."""
        unknown = [each for each in senders if each not in self._highest]
        known = self._granted.of_each(unknown)
        for sender in unknown:
            self._highest[sender] = known.get(sender, 0)

    def is_new(self, sender: bytes, freshness: Freshness) -> bool:
        """Whether no process has answered this counter, or a higher one, as far as is known: a
        grant of this moment elsewhere is found by :meth:`save`."""
        if sender not in self._highest and (known := self._granted.of(sender)):
            self._highest[sender] = known
        return super().is_new(sender, freshness)

    def raise_to(self, sender: bytes, freshness: Freshness) -> None:
        super().raise_to(sender, freshness)
        self._unsaved[sender] = freshness.counter

    def forget(self, sender: bytes) -> None:
        super().forget(sender)
        self._unsaved.pop(sender, None)

    def save(self) -> set[bytes]:
        """Write down what was granted, in a transaction; the senders whom another process answered
        first: they must get no answer from this one."""
        refused = self._granted.grant(dict(sorted(self._unsaved.items())))
        self._granted.when_kept(self._unsaved.clear)
        for sender in refused:
            self._highest.pop(sender, None)
        return refused


def life_of_cluster(store: Store, now_unix_seconds: int, random_bytes: RandomBytes) -> Presence:
    """The life that the cluster's processes go on with, or a new one where the home was served
    otherwise, or restored, since; in a transaction."""
    facts = store.facts
    last, incarnation = facts.started_unix_seconds, facts.cluster_life
    if incarnation is not None and last is not None and facts.cluster_started == last:
        return Presence(incarnation, last)
    started = now_unix_seconds if last is None else max(now_unix_seconds, last + 1)
    presence = new_presence(started, random_bytes)
    facts.started_unix_seconds = facts.cluster_started = started
    facts.cluster_life = presence.incarnation
    store.granted.clear()
    return presence


_WAIT_SECONDS = 0.05
_GATHER_SECONDS = 0.004
_HOLD_SECONDS = 0.25
_LOOK_SECONDS = 0.25
_BEAT_SECONDS = 1.0
_SWEEP_SECONDS = 10.0
_LOOK_UP_SECONDS = 0.02
_MOST_NEWCOMERS = 8192
_FLUSH_SECONDS = 2.0
_LEADERLESS_SECONDS = 600.0
_GROUP = 256
_PATIENCE_SECONDS = 60.0
_RETRY_SECONDS = 0.5
_ANOTHER_LIFE = "the coordinator was restarted: this worker starts again"


def placement_in(cluster: Cluster) -> Callable[[bytes], Placement]:
    """Where the devices of a cluster belong."""

    def placement_of(device_id: bytes) -> Placement:
        shard = shard_of(device_id)
        return Placement(shard, cluster.cell_of(shard))

    return placement_of


def client_name(root_fingerprint: bytes, slot: int) -> str:
    """What a slot's client ids begin with, coordinators' being below 0. The same over restarts: the
    broker ends the connections of a process that hangs when another has its place."""
    return hashlib.sha256(root_fingerprint + slot.to_bytes(4, "big", signed=True)).hexdigest()[:20]


@dataclass(frozen=True)
class Followed:
    """What a worker has of one task."""

    served: ServedTask
    keeper: ShareKeeper
    rounds: RoundFollower
    ingest: Ingest

    @property
    def task(self) -> Task:
        return self.served.task


class _Board:
    """The tasks, for whoever looks at them."""

    def __init__(self) -> None:
        self.served: list[Followed] = []
        self.revision = 0


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """What a worker counted of a task: since its start, and by width in the open round."""

    name: str
    counted: int
    widths: Mapping[int, int]
    outcomes: Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker says of itself. ``revision``: of the orders that it follows."""

    slot: int
    epoch: int
    revision: int
    connected: bool
    sessions: int
    tasks: tuple[TaskCounts, ...]
    ended: str = ""
    refused: tuple[str, ...] = ()
    """The topic filters that the broker refuses at present."""
    reached: bool = False
    """Whether a device has opened a session with it at the first of its brokers."""

    @property
    def counted(self) -> int:
        """Updates since its start, of all tasks."""
        return sum(each.counted for each in self.tasks)


class Worker:
    """One slot's process. Runs on the thread that calls :meth:`run`; :meth:`follow`,
    :meth:`status` and :meth:`share` are for any.

    It raises Deposed where another process has its slot, and leaves everything that it did not
    commit.
    """

    def __init__(self, post: Post, world: World) -> None:
        """Raises AggregatorError where its store cannot be used."""
        self._post, self._store, self._world = post, post.open_store(), world
        self._mail: queue.SimpleQueue[tuple[int, Orders]] = queue.SimpleQueue()
        self._ordered: tuple[int, Orders] | None = None  # not followed yet
        self._revision = -1
        self._epoch = 0
        self._parts: WorkerParts | None = None
        self._failing_seconds = 0.0  # since when, or 0
        self._ended = ""

    def follow(self, revision: int, orders: Orders) -> None:
        """Go by these orders from now on."""
        self._mail.put((revision, orders))

    def status(self) -> WorkerStatus:
        parts = self._parts
        return WorkerStatus(
            self._post.slot.number,
            self._epoch,
            self._revision,
            parts is not None and parts.heard,
            0 if parts is None else len(parts.table),
            () if parts is None else tuple(_counts(each) for each in parts.board.served),
            self._ended,
            () if parts is None else parts.refused,
            parts is not None and parts.reached,
        )

    def share(self, epoch: int, task: int, round_number: int, commit: int) -> bytes | None:
        """The state that this start of the worker committed so, unless it has another by now."""
        parts = self._parts if epoch == self._epoch else None
        for each in [] if parts is None else parts.board.served:
            if each.served.number == task and each.keeper.committed is not None:
                number, commits, state = each.keeper.committed
                if (number, commits) == (round_number, commit):
                    return state
        return None

    def run(self, stopping: Callable[[], bool]) -> None:
        """Wait for orders, and work until ``stopping()``."""
        try:
            while not stopping():
                if self._parts is None:
                    self._await_orders()
                else:
                    self._work(self._parts)
            if self._parts is not None:
                self._parts.stop()
        except BaseException as error:
            self._ended = f"{type(error).__name__}: {error}"
            if self._parts is not None:
                self._parts.link.stop()
            raise
        finally:
            self._store.database.close()

    def _await_orders(self) -> None:
        try:
            revision, orders = self._mail.get(timeout=_WAIT_SECONDS)
        except queue.Empty:
            return
        slot = self._post.slot
        with self._store.database.transaction():
            if self._store.facts.cluster_life != orders.incarnation:
                raise Deposed(_ANOTHER_LIFE)
            self._epoch = self._store.workers.start(
                slot.number, slot.cell.name, f"{len(slot.shards())} of {SHARDS}", __version__
            )
        self._parts = WorkerParts(self._post, self._store, self._world, self._epoch, orders)
        self._parts.take(orders)
        self._revision = revision
        self._parts.link.start()
        LogEvent.WORKER_SERVES.log(worker=slot, epoch=self._epoch)

    def _work(self, parts: WorkerParts) -> None:
        """One turn. A store that is away is waited for, and costs no session; one that will not do
        for a minute ends this worker."""
        try:
            parts.turn()
            self._take_orders(parts)
        except STORE_FAILURES as error:
            now = self._world.clock()
            since = self._failing_seconds
            self._failing_seconds = since or now
            is_away = isinstance(error, StoreAway)
            if not is_away and now - self._failing_seconds > _PATIENCE_SECONDS:
                raise
            if not (is_away and since):  # said once, however long it is away
                LogEvent.STORE_FAILS.log(problem=error)
            self._world.sleep(_RETRY_SECONDS)
        else:
            self._failing_seconds = 0.0

    def _take_orders(self, parts: WorkerParts) -> None:
        while not self._mail.empty():
            self._ordered = self._mail.get()
        if self._ordered is not None:
            revision, orders = self._ordered
            parts.take(orders)
            self._revision, self._ordered = revision, None


class WorkerParts:
    """What a worker is made of once it knows its orders."""

    def __init__(
        self,
        post: Post,
        store: Store,
        world: World,
        epoch: int,
        orders: Orders,
    ) -> None:
        slot, clock = post.slot, world.clock
        self._unix_clock = unix_clock = steady_clock(store, clock, world.unix_clock)
        store.database.guard = lambda: store.workers.require(slot.number, epoch)
        self._slot, self._epoch = slot, epoch
        self._store, self._clock, self._sleep = store, clock, world.sleep
        self._incarnation = orders.incarnation
        self._orders: Orders | None = None
        self._group_keys: tuple[GroupKey, ...] = store.secrets.group_keys()
        self.registry = HeldRegistry(store.devices)
        self._shared = shared = Shared(
            self.registry,
            Refusals(),
            Topics(post.settings.broker.prefix),
            clock,
            unix_clock,
            world.random_bytes,
            post.settings,
            store,
        )
        self._keyring = keyring = keyring_of(orders.keys)
        self._marks = StoredMarks(orders.incarnation, store.granted)
        opens = Bounds.of(post.settings.admission.opens_share, clock)
        self.table = SessionTable(
            keyring,
            orders.incarnation,
            opens.buckets,
            opens.budget,
            clock,
            unix_clock,
            marks=self._marks,
            random_bytes=world.random_bytes,
        )
        self.board = _Board()
        self._reassembler, repeats = Reassembler(clock), Repeats(clock)
        self.inbox = Inbox(shared.refusals, repeats)
        self._uplink = Uplink(
            shared, self.table, self._reassembler, None, repeats, lambda: self._told_keys()
        )
        self._standings = Standings(shared, self.board, self.table)
        placement_of, chunks = placement_in(post.cluster), post.cluster.chunks
        self._placements = Placements(
            shared,
            self.table,
            lambda device_id: replace(
                placement_of(device_id), mirror=chunks, packet_bytes=self.link.packet_bytes or 0
            ),
            slot.cell.name,
            always=store.facts.mirrored,
        )
        client = client_name(post.root_fingerprint, slot.number)
        if slot.of == 1:
            hears = Hears(None, NEWCOMER_LIMIT, fleet=False, client=client)
        else:
            # For each filter of QoS 1 a clustered broker keeps a queue, on several nodes.
            filters = tuple(shared.topics.up_filter(shard) for shard in slot.shards())
            hears = Hears(filters, NEWCOMER_LIMIT, qos=0, fleet=False, client=client)
        ends = [(way, hears) for way in post.ways]
        self.link = links_to(shared, world.link, world.rng.spawn(3), ends)
        self._outgoing = Outgoing(self.link, store.retained)
        self._opened: list[tuple[bytes, Answer]] = []
        # Of devices that are not known here: by the handle of their topic, in the order they came.
        self._newcomers: deque[tuple[bytes, Message]] = deque(maxlen=_MOST_NEWCOMERS)
        self._next_look_up = clock()
        self._next_look = self._next_beat = self._next_sweep = clock()
        self._next_commit: dict[int, float] = {}
        self._commit_by = clock()
        self._led_seconds = clock()
        self.heard = False
        """Whether all of its shards' devices can be heard and answered."""
        self.reached = False
        """Whether a device has opened a session at the first of its brokers."""
        self.refused: tuple[str, ...] = ()
        """The topic filters that the broker refuses at present."""

    def take(self, orders: Orders) -> None:
        """Go by these orders."""
        if orders.incarnation != self._incarnation:
            raise Deposed(_ANOTHER_LIFE)
        if self._orders is not None and orders.keys != self._orders.keys:
            self._keyring = keyring_of(orders.keys)
            self.table.replace_keyring(self._keyring)
        known = {each.served.number: each for each in self.board.served}
        board = []
        for served in orders.tasks:
            before = known.get(served.number)
            if before is not None and _same(before.served, served):
                board.append(before)
            else:
                if before is not None:
                    self._commit(before)
                board.append(self._followed(served, before))
        self.board.served = board
        self.board.revision += 1
        self.inbox.serve({each.task.name: each.ingest for each in board}, orders.absent)
        self._orders = orders
        self._next_look = self._clock()

    def turn(self) -> None:
        """Take what came, commit what is due, and answer it."""
        wait_seconds = _LOOK_UP_SECONDS if self._newcomers else _WAIT_SECONDS
        events = self.link.events(most=_GROUP, timeout_seconds=wait_seconds)
        self._commit_by = self._clock() + _HOLD_SECONDS
        self._handle(events)
        if 0 < len(events) < _GROUP:
            self._sleep(_GATHER_SECONDS)
            self._handle(self.link.events(most=_GROUP, timeout_seconds=0.0))
        if self._newcomers and self._clock() >= self._next_look_up:
            self._look_up()
            self._next_look_up = self._clock() + _LOOK_UP_SECONDS
        for owner, times in self.link.take_refused().items():
            self._shared.refusals.note_reason("too-many", owner, "more than the limit", times)
        self._commit_due()
        self._unix_clock.look(self._keyring.newest.descriptor.delegation.expires_unix_seconds)
        now = self._clock()
        self._send_all(self._standings.due())
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self.look()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            with self._store.database.transaction(shared=True):
                self._store.workers.beat(self._slot.number, connected=self.heard)
                self.registry.save_seen()
                for each in self.board.served:
                    each.rounds.save_late()
            if self._store.lease.is_held():
                self._led_seconds = now
            elif now - self._led_seconds > _LEADERLESS_SECONDS:
                raise Deposed("nobody has coordinated for ten minutes: this worker ends")
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_SECONDS
            self.table.sweep()
            self._reassembler.expire()
            with self._store.database.transaction(shared=True):
                for each in self.board.served:
                    each.ingest.save_seen()
                self._shared.refusals.save(self._store.refusals)
            for device_id in self.registry.let_go(self.table.__contains__):
                for part in (self._marks, self._standings, self._placements):
                    part.forget(device_id)

    def commit(self) -> None:
        """Commit and answer what came, whatever the pace."""
        self._grant()
        for each in self.board.served:
            self._commit(each)

    def look(self) -> None:
        """See what changed in the store."""
        for row in self.registry.refresh():
            self._send_all(self._uplink.farewell(row))
            LogEvent.REVOKED.log(device=row.device_id)
        self._group_keys = self._store.secrets.group_keys()
        for each in self.board.served:
            if each.rounds.refresh():
                self._standings.remind(each.rounds.silent)
                each.ingest.round_opened()

    def stop(self) -> None:
        """Commit and answer what came, and end."""
        self.commit()
        with self._store.database.transaction(shared=True):
            for each in self.board.served:
                each.ingest.save_seen()
                each.rounds.save_late()
            self.registry.save_seen()
            self._shared.refusals.save(self._store.refusals)
        self.link.stop(flush_seconds=_FLUSH_SECONDS)

    def close(self) -> None:
        """End without a word: what was not committed is forgotten."""
        self.link.stop()
        self._store.database.close()

    def _followed(self, served: ServedTask, before: Followed | None) -> Followed:
        store = self._store.task(served.number)
        shared = TaskShared.of(self._shared, served.task, store)
        keeper = ShareKeeper(served, shared, self._slot.number, self._epoch)
        number = served.number
        rounds = RoundFollower(shared, self._slot, keeper, lambda: self._leave_round(number))
        task = served.task
        evaluator = Evaluator(store, task.name, task.evaluation, task.round.most_age)
        parts = ModelParts.of([each.manifest for each in served.artifacts()])
        ingest = Ingest(shared, rounds, keeper, evaluator, parts)
        if before is not None:
            ingest.follow(before.ingest)
        return Followed(served, keeper, rounds, ingest)

    def _leave_round(self, number: int) -> None:
        for each in self.board.served:
            if each.served.number == number:
                self._commit(each)

    def _told_keys(self) -> tuple[GroupKey, ...]:
        return self._group_keys[-MOST_KEYS:]

    def _commit_due(self) -> None:
        self._grant()
        now = self._clock()
        for each in self.board.served:
            if len(each.ingest) and now >= self._next_commit.get(each.served.number, 0.0):
                self._commit(each)
                self._next_commit[each.served.number] = now + each.keeper.pause_seconds
        self._commit_by = self._clock() + _HOLD_SECONDS

    def _keep_pace(self) -> None:
        """What is staged does not wait for all that came with it: what is late, say, is looked up
        one by one."""
        if self._clock() >= self._commit_by:
            self._commit_by = math.inf
            with suppress(*STORE_FAILURES):  # else the rest is forgotten; the turn's end tells
                self._commit_due()

    def _handle(self, events: Iterable[Event]) -> None:
        refused = set(self.refused)
        detail = ""
        for event in events:
            match event:
                case Message():
                    self._receive(event)
                case Connected():
                    self.heard = True
                case Disconnected() | ConnectRefused():
                    self.heard = False
                case Subscribed():
                    refused.discard(event.topic_filter)
                case SubscribeRefused():
                    refused.add(event.topic_filter)
                    detail = event.detail
                case _:
                    pass
        if refused != set(self.refused):
            self._tell_of(refused, detail)

    def _tell_of(self, refused: Collection[str], detail: str) -> None:
        self.refused = tuple(sorted(refused))
        if not refused:
            LogEvent.SUBSCRIPTIONS_GRANTED.log()
        elif detail:
            LogEvent.SUBSCRIPTIONS_REFUSED.log(
                count=len(refused), topic=self.refused[0], problem=detail
            )

    def _look_up(self) -> None:
        """Read the rows of the devices that have come, and take what they said. Where the store
        fails they wait."""
        handles = {handle for handle, _ in self._newcomers}
        self._marks.learn(self.registry.look_up(handles))
        waiting = [message for _, message in self._newcomers]
        self._newcomers.clear()
        for message in waiting:
            self._receive(message, looked_up=True)

    def _receive(self, message: Message, *, looked_up: bool = False) -> None:
        self._keep_pace()
        refusals = self._shared.refusals
        result = self._uplink.receive(message)
        if isinstance(result, Refusal) and result.unknown and not looked_up:
            # Who is not known here has no session here: of all but an open the head says enough.
            head = replace(message, payload=message.payload[:MAX_OPEN_BYTES])
            self._newcomers.append((result.unknown, head))
            return
        match result:
            case Answer() if result.opened:
                self._opened.append((result.opened, result))
                self.reached |= message.place == 0
            case Answer():
                self._outgoing.send(result.topic, result.payload)
            case Refusal():
                refusals.note(result.error, result.device_id)
                if result.answer is not None:
                    self._outgoing.send_receipts([result.answer[:2]])
            case Left():
                self._dismiss(result.device_id)
            case Arrived():
                self._send_all(self._standings.heard(result.device_id))
                self._send_all(self._placements.heard(result.device_id))
                try:
                    settled = self.inbox.offer(result.device_id, result.payload, result.record)
                except WireError as error:
                    refusals.note(error, result.device_id)
                else:
                    self._answer([] if settled is None else [settled])

    def _grant(self) -> None:
        """Send the replies to opens, once their counters are written down."""
        if not self._opened:
            return
        with self._store.database.transaction(shared=True):
            refused = self._marks.save()
        opened, self._opened = self._opened, []
        for device_id, answer in opened:
            if device_id in refused:
                self.table.end(device_id)  # another worker granted this open, or a later one
                continue
            self._outgoing.send(answer.topic, answer.payload)
            self._send_all(self._standings.opened(device_id))
            self._send_all(self._placements.opened(device_id))

    def _commit(self, each: Followed) -> None:
        """Commit and answer what is staged. Where the store fails, it stays staged."""
        for tries_left in (1, 0):
            try:
                # What the store has is what counts: perhaps a commit that failed is there all the
                # same, or another worker has taken something of the same device.
                self._answer(each.ingest.sift())
                self._answer(each.ingest.commit())
            except RoundOver:
                # Those devices send again, and are told that the round is over.
                each.ingest.abandon()
                self._next_look = self._clock()
            except STORE_FAILURES:
                if tries_left:
                    continue
                raise
            except Deposed:
                raise
            except Exception as error:
                # Of this task alone. Those devices send again, until it is let go.
                each.ingest.abandon()
                with about(each.task.name):
                    each.keeper.hold(error)
                self._next_look = self._clock()
            return

    def _answer(self, settled: Sequence[Settled]) -> None:
        answer_updates(settled, self._uplink, self._outgoing, self._standings)

    def _dismiss(self, device_id: bytes) -> None:
        with self._store.database.transaction():
            revoke(self._store, device_id, int(self._unix_clock()))
        LogEvent.LEFT.log(device=device_id)
        self.look()

    def _send_all(self, messages: Iterable[tuple[str, bytes]]) -> None:
        for topic, payload in messages:
            self._outgoing.send(topic, payload)


def _counts(each: Followed) -> TaskCounts:
    ingest = each.ingest
    return TaskCounts(
        each.task.name, ingest.counted, ingest.widths.copy(), dict(ingest.outcomes.copy())
    )


def _same(before: ServedTask, now: ServedTask) -> bool:
    return (
        before.generation == now.generation
        and before.task == now.task
        and before.task.text == now.task.text
    )


def run_on_thread(worker: Worker, ended: Callable[[BaseException | None], None]) -> threading.Event:
    """Run it on a thread of its own until the event that is returned is set; ``ended`` is called
    from there with what it raised."""
    stopping = threading.Event()

    def work() -> None:
        try:
            worker.run(stopping.is_set)
        except BaseException as error:
            ended(error)
        else:
            ended(None)

    threading.Thread(target=work, name="tessera-worker", daemon=True).start()
    return stopping
