"""The main loop: messages in, work, receipts out. It waits for no device and no broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aggregator.clock import SteadyClock
from aggregator.errors import AggregatorError
from aggregator.events import LogEvent
from aggregator.keys.fence import Fence
from aggregator.keys.folder import FleetKeys
from aggregator.keys.registry import revoke
from aggregator.publish.publisher import Announcements
from aggregator.rounds.ingest import Inbox, Settled
from aggregator.rounds.machine import RoundClosed, RoundEvent, RoundOpened
from aggregator.serve.broker_links import BrokerLinks
from aggregator.serve.housekeeping import Housekeeping
from aggregator.serve.metrics import Snapshot, TaskSnapshot
from aggregator.serve.outgoing import Outgoing, answer_updates
from aggregator.serve.receipt_times import ReceiptTimes
from aggregator.serve.standings import Placements, Standings
from aggregator.serve.successor import WatchMove
from aggregator.serve.tasks import TaskBoard, TaskParts
from aggregator.serve.uplink import Answer, Arrived, Left, Refusal, Uplink
from aggregator.shared import Shared
from aggregator.task.evaluation import metric_of
from aggregator.task.file import Task
from device_sdk.link.events import (
    Connected,
    ConnectRefused,
    Disconnected,
    Event,
    Message,
    PublishRefused,
    Subscribed,
    SubscribeRefused,
)
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.topics import DescriptorTopic, PresenceTopic
from device_sdk.wire.seal.announcement import Presence
from device_sdk.wire.seal.session_table import SessionTable

# Which of its subscriptions the broker grants the aggregator.

_MOST_REFUSALS_AT_THE_START = 3


class Listening:
    """Follows grants and refusals; the link asks again for what was refused, with growing waits.

    A subscription that was granted once is waited for as long as it takes: the broker's rules may
    be mended, and a refusal may be a damaged packet's. One that never was, and is refused three
    times in a row, is most likely forbidden to this user, whom nobody but the operator can help.
    ``moves``: there are other brokers, where devices may be, and which may be away for a moment:
    the rules of one end nothing.
    """

    def __init__(self, *, moves: bool) -> None:
        self._moves = moves
        self._granted: set[str] = set()
        self._refusals: Counter[str] = Counter()

    @property
    def refused(self) -> tuple[str, ...]:
        """The topic filters that the broker refuses at present."""
        return tuple(sorted(self._refusals))

    def granted(self, event: Subscribed) -> None:
        self._granted.add(event.topic_filter)
        if self._refusals.pop(event.topic_filter, 0):
            LogEvent.SUBSCRIPTION_GRANTED.log(topic=event.topic_filter)

    def was_refused(self, event: SubscribeRefused) -> None:
        """The broker refused one. Raises AggregatorError where asking again is of no use."""
        topic_filter = event.topic_filter
        self._refusals[topic_filter] += 1
        times = self._refusals[topic_filter]
        never = topic_filter not in self._granted and not self._moves
        if never and times >= _MOST_REFUSALS_AT_THE_START:
            raise AggregatorError(
                f"the broker refused the subscription to {topic_filter} {times} times "
                f"({event.detail}): give this user the rights of aggregator/acl.template"
            )
        LogEvent.SUBSCRIPTION_REFUSED.log(
            topic=topic_filter, problem=event.detail, retry_seconds=event.retry_seconds
        )


_IDLE_SECONDS = 0.25
_BUSY_SECONDS = 0.01
_GATHER_SECONDS = 0.004
_FLUSH_SECONDS = 2.0
_SHOWN_ROUNDS = 8
_SNAPSHOT_SECONDS = 1.0
_LOOK_SECONDS = 0.25
_SHOW_AGAIN_SECONDS = 60.0
_TOO_MANY = "more messages than the limit allows on its topic: they were not looked at"


@dataclass(frozen=True)
class Parts(Shared):
    """What a service is made of; see :mod:`aggregator.serve.assembly`."""

    link: BrokerLinks
    table: SessionTable
    uplink: Uplink
    inbox: Inbox
    tasks: TaskBoard
    announcements: Announcements
    standings: Standings
    placements: Placements
    outgoing: Outgoing
    time: SteadyClock
    keys: FleetKeys
    fence: Fence
    housekeeping: Housekeeping
    sleep: Callable[[float], None]
    life: Presence
    move: WatchMove
    changed: Callable[[], bool]
    """Whether the operator did something since the last call."""

    @property
    def first(self) -> TaskParts:
        """The parts of the first task, the only one for most."""
        return self.tasks.first


class Service:
    """Runs on one thread. ``on_round`` is told what happens to rounds, from that thread;
    ``complete`` adds to what there is to see what other processes have of it."""

    def __init__(
        self,
        parts: Parts,
        on_round: Callable[[RoundEvent], None] | None = None,
        complete: Callable[[Snapshot], Snapshot] = lambda seen: seen,
    ) -> None:
        self._parts = parts
        self._on_round = on_round
        self._complete = complete
        self._listening = Listening(moves=len(parts.move.ways) > 1)
        self._fenced = {
            parts.topics.write(DescriptorTopic()): parts.fence.heard_descriptor,
            parts.topics.write(PresenceTopic()): parts.fence.heard_presence,
        }
        self.bytes_received = 0
        self.receipt_times = ReceiptTimes()
        self._last: Snapshot | None = None
        self._published_under = -1  # the serial of a descriptor
        self._next_snapshot_seconds = 0.0
        self._next_showing_seconds = parts.clock() + _SHOW_AGAIN_SECONDS
        self._next_look_seconds = parts.clock() + _LOOK_SECONDS
        self._problems = parts.store.facts.clock_problem or "", parts.store.facts.keys_problem or ""

    @property
    def first_task(self) -> Task:
        """The first task as it is served now."""
        return self._parts.first.task

    @property
    def task_names(self) -> list[str]:
        """The tasks that are served now, the first one first."""
        return [name for name, _ in self._parts.tasks.names]

    def run(self, stopping: Callable[[], bool], on_turn: Callable[[], None]) -> None:
        """Work until ``stopping()``; ``on_turn`` is called a few times a second or more."""
        while not stopping():
            self.turn()
            on_turn()
            now = self._parts.clock()
            if now >= self._next_snapshot_seconds:
                self._next_snapshot_seconds = now + _SNAPSHOT_SECONDS
                self._last = self.snapshot()

    def turn(self) -> None:
        """One turn of the loop: at most a quarter of a second when nothing happens."""
        parts = self._parts
        wait_seconds = _BUSY_SECONDS if parts.outgoing.busy else _IDLE_SECONDS
        for task in parts.tasks.served:
            left = task.rounds.seconds_left()
            if left is not None:
                wait_seconds = min(wait_seconds, max(0.0, left))
        group = parts.first.task.store.group_updates
        events = parts.link.events(most=group, timeout_seconds=wait_seconds)
        came_seconds = parts.clock()
        if parts.changed():
            self._look_again()
        for event in events:
            self._handle(event)
        staged = sum(len(task.ingest) for task in parts.tasks.served)
        if 0 < staged < group:
            # A few more to share the commit: each costs a flush of the disk, however small it is.
            # Asleep, since the link's thread reads faster when nobody takes one by one.
            parts.sleep(_GATHER_SECONDS)
            for event in parts.link.events(most=group, timeout_seconds=0.0):
                self._handle(event)
        for owner, times in parts.link.take_refused().items():
            parts.refusals.note_reason("too-many", owner, _TOO_MANY, times)
        answered = sum(self._commit(task) for task in parts.tasks.served)
        if answered:
            took = parts.clock() - came_seconds
            self.receipt_times = self.receipt_times.with_group(answered, took)
        self._look_at_clock_and_keys()
        self._tick()
        self._look_at_files()
        self._send_all(parts.standings.due())
        if parts.announcements.names_changed():
            self._announce([parts.announcements.tasks()], [])
        self._tend_keys()
        if parts.keys.current().descriptor.serial != self._published_under:
            self._publish_anew()
        if parts.fence.may_announce():
            with parts.store.database.transaction():  # before anybody hears of it
                parts.store.facts.announced_unix_seconds = parts.fence.started_unix_seconds
            parts.outgoing.announce(parts.announcements.standing(), parts.store.retained.topics())
        parts.outgoing.pump()
        parts.housekeeping.turn()

    def _commit(self, task: TaskParts) -> int:
        """Decide what came for a task, and answer it; how many updates that were."""
        settled: Sequence[Settled] = ()
        with self._parts.tasks.within(task):
            settled = task.ingest.commit()
        self._answer(settled)
        return len(settled)

    def _tick(self) -> None:
        """Open and close what is due: each task one step at a time, until none has another."""
        happened = True
        while happened:
            happened = False
            for task in self._parts.tasks.served:
                event = None
                with self._parts.tasks.within(task):
                    event = task.rounds.tick()
                if event is not None:
                    happened = True
                    self._tell(task, event)

    def last_snapshot(self) -> Snapshot | None:
        """A snapshot of the last second, for other threads; None at the very beginning."""
        return self._last

    def stop(self) -> None:
        """Send what is decided, and close."""
        self.end()
        self._parts.store.database.close()

    def end(self) -> None:
        """As :meth:`stop`, and leave the store open."""
        parts = self._parts
        for task in parts.tasks.served:
            self._commit(task)
        parts.link.stop(flush_seconds=_FLUSH_SECONDS)
        parts.outgoing.stop()
        with parts.store.database.transaction():
            for task in parts.tasks.served:
                task.ingest.save_seen()
            parts.refusals.save(parts.store.refusals)
            parts.registry.save_seen()

    def abandon(self) -> None:
        """End without a word, and leave the store: what was not committed is forgotten here, and
        comes again."""
        self._parts.link.stop()
        self._parts.outgoing.stop()

    @property
    def link(self) -> BrokerLinks:
        """To the broker."""
        return self._parts.link

    def refused_topics(self) -> tuple[str, ...]:
        """The topic filters that the broker refuses at present."""
        return self._listening.refused

    def snapshot(self) -> Snapshot:
        parts = self._parts
        seen = Snapshot(
            connected=parts.link.connected,
            broker=parts.link.broker,
            devices=len(parts.registry),
            sessions=len(parts.table),
            bytes_received=self.bytes_received,
            bytes_sent=parts.outgoing.bytes_sent,
            refusals=dict(parts.refusals.counts),
            refused_subscriptions=self._listening.refused,
            broker_losses=parts.link.lost,
            receipt_times=self.receipt_times,
            tasks=tuple(_seen(task) for task in parts.tasks.served),
        )
        return self._complete(seen)

    def _handle(self, event: Event) -> None:
        parts = self._parts
        match event:
            case Message():
                self._receive(event)
            case Connected():
                self._fit(parts.link.packet_bytes)
                parts.outgoing.connected()
                parts.fence.connected()
            case Disconnected() | ConnectRefused():
                parts.outgoing.connection_lost()
            case Subscribed():
                self._listening.granted(event)
            case SubscribeRefused():
                self._listening.was_refused(event)
            case PublishRefused():
                LogEvent.MESSAGE_REFUSED.log(topic=event.topic, problem=event.detail)

    def _fit(self, packet_bytes: int | None) -> None:
        """The broker's largest packet may be another than what is published was cut for."""
        store = self._parts.store
        if packet_bytes == store.facts.packet_bytes:
            return
        store.facts.packet_bytes = packet_bytes
        if packet_bytes is not None and store.retained.largest_bytes() > packet_bytes:
            for task in self._parts.tasks.served:
                task.rounds.begin_anew()

    def _receive(self, message: Message) -> None:
        parts = self._parts
        self.bytes_received += len(message.payload)
        heard = self._fenced.get(message.topic)
        if heard is not None:
            try:
                heard(message.payload)
            except WireError as error:
                parts.refusals.note(error)
            return
        result = parts.uplink.receive(message)
        match result:
            case Answer():
                parts.outgoing.send(result.topic, result.payload)
                if result.opened:
                    if message.place == 0:
                        parts.move.reached()
                    self._send_all(parts.standings.opened(result.opened))
                    self._send_all(parts.placements.opened(result.opened))
            case Refusal():
                parts.refusals.note(result.error, result.device_id)
                if result.answer is not None and parts.fence.passed:
                    parts.outgoing.send_receipts([result.answer[:2]])
                if result.error.reason == "old-incarnation":
                    self._show_presence_again()
            case Left():
                self._dismiss(result.device_id)
            case Arrived():
                self._send_all(parts.standings.heard(result.device_id))
                self._send_all(parts.placements.heard(result.device_id))
                try:
                    settled = parts.inbox.offer(result.device_id, result.payload, result.record)
                except WireError as error:
                    parts.refusals.note(error, result.device_id)
                else:
                    self._answer([] if settled is None else [settled])

    def _answer(self, settled: Sequence[Settled]) -> None:
        parts = self._parts
        answer_updates(settled, parts.uplink, parts.outgoing, parts.standings)

    def _dismiss(self, device_id: bytes) -> None:
        """A device leaves: it is revoked, as by the operator."""
        parts = self._parts
        with parts.store.database.transaction():
            revoke(parts.store, device_id, int(parts.unix_clock()))
        LogEvent.LEFT.log(device=device_id)
        self._look_again()

    def _send_all(self, messages: Iterable[tuple[str, bytes]]) -> None:
        for topic, payload in messages:
            self._parts.outgoing.send(topic, payload)

    def _show_presence_again(self) -> None:
        """Somebody asks another life: perhaps an old presence was put in the place of ours.

        Not more often, since anybody can send such a request, and all devices get the presence.
        """
        now = self._parts.clock()
        if now >= self._next_showing_seconds:
            self._next_showing_seconds = now + _SHOW_AGAIN_SECONDS
            announcements = self._parts.announcements
            self._announce([announcements.tasks(), announcements.presence()], [])

    def _announce(self, standing: Iterable[tuple[str, bytes]], topics: Iterable[str]) -> None:
        """Before the fence is passed nothing: all of it is announced then."""
        if self._parts.fence.passed:
            self._parts.outgoing.announce(standing, topics)

    def _tell(self, task: TaskParts, event: RoundEvent) -> None:
        parts = self._parts
        if isinstance(event, RoundOpened):
            task.ingest.round_opened()
            parts.housekeeping.something_was_deleted()  # keys and publications that it replaced
            # The operator may have rotated keys since the loop looked.
            standing = parts.announcements.standing() if parts.keys.refresh() else []
            # Only what is new: artifacts need not be sent again for each round.
            contents = parts.store.contents.take_replaced()
            self._announce(standing, contents + task.store.publications.take_replaced())
        elif isinstance(event, RoundClosed):
            parts.housekeeping.something_was_deleted()  # the log, or an older checkpoint
            parts.standings.remind(event.silent)
            self._published_under = -1  # none may follow it
            with parts.store.database.transaction():
                task.ingest.save_seen()  # the next group may be a day away
            with parts.tasks.within(task):
                if not parts.tasks.between_rounds(task):
                    task.upkeep.between_rounds()
            self._tend_keys()
        if self._on_round is not None:
            with parts.tasks.about(task):
                self._on_round(event)

    def _tend_keys(self) -> None:
        parts = self._parts
        between_rounds = all(task.rounds.current is None for task in parts.tasks.served)
        if parts.keys.tend(between_rounds=between_rounds):
            self._announce(parts.announcements.standing(), [])

    def _publish_anew(self) -> None:
        """Other keys may be in force than those that signed what lies at the broker, or a round was
        closed that they signed. A round that rests begins anew, and what is left of one that is
        over, and that no other follows, is cleared; of others devices see the next one soon."""
        self._published_under = self._parts.keys.current().descriptor.serial
        for task in self._parts.tasks.served:
            rounds, publisher = task.rounds, task.publisher
            if publisher.is_readable:
                continue
            if rounds.rests:
                rounds.begin_anew()
            elif rounds.paused and rounds.current is None:
                with self._parts.store.database.transaction():
                    publisher.withdraw_round()

    def _look_again(self) -> None:
        """The operator changed something: revoked, rotated, asked for a task or version."""
        parts = self._parts
        parts.move.require_same()
        for row in parts.registry.refresh():
            parts.store.devices.forget_told(row.device_id)  # what came while it was being revoked
            self._send_all(parts.uplink.farewell(row))
            for task in parts.tasks.served:
                task.rounds.revoked(row.device_id)
            LogEvent.REVOKED.log(device=row.device_id)
        parts.tasks.look_again()
        for task in parts.tasks.served:
            task.rounds.labels_changed()
        parts.housekeeping.something_was_deleted()
        if parts.keys.refresh():
            self._announce(parts.announcements.standing(), [])

    def _look_at_clock_and_keys(self) -> None:
        """The calendar, and what ``status`` says of it, and of the keys."""
        parts, facts = self._parts, self._parts.store.facts
        parts.time.look(parts.keys.current().descriptor.delegation.expires_unix_seconds)
        found = parts.time.problem, parts.keys.problem
        if found != self._problems:
            facts.clock_problem, facts.keys_problem = self._problems = found

    def _look_at_files(self) -> None:
        now = self._parts.clock()
        if now >= self._next_look_seconds:
            self._next_look_seconds = now + _LOOK_SECONDS
            self._parts.move.require_time()
            self._parts.tasks.look_at_files()


def _seen(task: TaskParts) -> TaskSnapshot:
    latest = task.store.rounds.latest(_SHOWN_ROUNDS + 1)
    rounds = task.rounds
    return TaskSnapshot(
        name=task.task.name,
        eligible=rounds.eligible,
        wait_for_devices=task.task.round.wait_for_devices,
        paused=rounds.paused,
        version=task.aggregation.version,
        current=rounds.current,
        seconds_left=rounds.seconds_left(),
        waits_for=rounds.waits_for,
        arrived=rounds.arrived,
        participants=max(task.aggregation.participants, rounds.arrived),
        quorum=task.task.round.quorum,
        counted=task.ingest.counted,
        widths=dict(task.ingest.widths),
        parts=task.ingest.parts,
        outcomes=dict(task.ingest.outcomes),
        unpublished=rounds.unpublished,
        finished=tuple(row for row in latest if not row.unfinished),
        evaluated=next(iter(task.store.evaluations.latest()), None),
        metric=metric_of(task.task.ranking),
        control=task.task.has_control,
        stopped=rounds.stopped,
    )
