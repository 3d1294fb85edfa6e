"""Puts the parts of a service together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.clock import steady_clock
from aggregator.events import LogEvent, about
from aggregator.home import AggregatorHome
from aggregator.keys.enrolment import Enrolment
from aggregator.keys.fence import Fence, next_start
from aggregator.keys.folder import FleetKeys
from aggregator.keys.registry import Registry
from aggregator.publish.mirror import ChunkMirror
from aggregator.publish.publisher import Announcements, Publisher
from aggregator.refusals import Refusals
from aggregator.rounds.aggregation import Aggregation, VersionKeeper
from aggregator.rounds.attendance import Attendance, KnownHabits
from aggregator.rounds.evaluator import Evaluator
from aggregator.rounds.ingest import Inbox, Ingest, Repeats
from aggregator.rounds.machine import RoundMachine
from aggregator.rounds.model_parts import ModelParts, taken_for_one
from aggregator.serve.broker_links import BrokerLinks, Hears, links_to
from aggregator.serve.housekeeping import Housekeeping, Upkeep
from aggregator.serve.outgoing import Outgoing
from aggregator.serve.service import Parts
from aggregator.serve.standings import PlacementOf, Placements, Standings
from aggregator.serve.successor import WatchMove
from aggregator.serve.tasks import TaskBoard, TaskParts
from aggregator.serve.uplink import Uplink
from aggregator.shared import Shared, TaskShared
from aggregator.store import Store, TaskStore
from aggregator.task.artifacts import read_artifacts
from aggregator.task.file import RoundSettings, Task, served_catalogue
from device_sdk.link import LinkSettings
from device_sdk.link.broker_url import BrokerWay
from device_sdk.wire.publish.chunks import Reassembler
from device_sdk.wire.publish.topics import Topics
from device_sdk.wire.seal.admission import TokenBuckets, WorkBudget
from device_sdk.wire.seal.announcement import Presence, new_presence
from device_sdk.wire.seal.enrolment import EnrolmentDesk
from device_sdk.wire.seal.freshness import FreshnessMarks
from device_sdk.wire.seal.keys import RandomBytes
from device_sdk.wire.seal.placement import Placement, own_placement
from device_sdk.wire.seal.session_table import SessionTable

_BURST = 20.0
_REFILL_PER_SECOND = 0.2
LINK_SETTINGS = LinkSettings(
    backoff_first_seconds=0.5,
    backoff_most_seconds=10.0,
    in_flight=1024,
    send_queue_messages=16_384,
    send_queue_bytes=64 << 20,
    filters_in_packet=256,  # of a worker's thousands
    receive_maximum=2048,
    read_bytes=1 << 20,
)


@dataclass(frozen=True)
class World:
    """Time and chance, and how long links wait. ``clock``: monotonic seconds; ``unix_clock``: this
    machine's calendar, Unix seconds, which may jump."""

    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    rng: np.random.Generator
    random_bytes: RandomBytes = os.urandom
    sleep: Callable[[float], None] = time.sleep
    link: LinkSettings = LINK_SETTINGS


@dataclass(frozen=True)
class Bounds:
    """What is heard of those who ask: of each so many, of all together a share of the time."""

    buckets: TokenBuckets
    budget: WorkBudget

    @classmethod
    def of(cls, share: float, clock: Callable[[], float]) -> Bounds:
        """``share`` of the time; ``clock`` gives monotonic seconds."""
        return cls(TokenBuckets(_BURST, _REFILL_PER_SECOND, clock), WorkBudget(share, clock))


class Whole:
    """An aggregator that does everything in one process. A cluster's coordinator differs in what
    stands here. ``placement_of``: where devices belong."""

    def __init__(self, placement_of: PlacementOf = own_placement) -> None:
        self.placement_of = placement_of

    def aggregation(self, *parts: Any) -> Aggregation:
        """Of a task, from what :class:`Aggregation` is made of."""
        return Aggregation(*parts)

    def begin_life(
        self, store: Store, now_unix_seconds: int, random_bytes: RandomBytes
    ) -> Presence:
        """A presence that started after all before it in this home, whatever the calendar says."""
        started = next_start(store.facts.started_unix_seconds, now_unix_seconds)
        presence = new_presence(started, random_bytes)
        with store.database.transaction():
            store.facts.started_unix_seconds = started  # before anybody hears of it
        return presence

    def marks(self, store: Store, life: Presence) -> FreshnessMarks:
        """Of the enrolment requests that were answered in this life."""
        return FreshnessMarks(life.incarnation)

    def attendance(self, store: TaskStore, settings: RoundSettings) -> Attendance:
        """Who was heard of in a task's rounds."""
        return Attendance(KnownHabits(store.habits), settings, store.fleet.devices.seen_among)

    def links(
        self,
        shared: Shared,
        settings: LinkSettings,
        rngs: list[np.random.Generator],
        ways: Sequence[BrokerWay],
    ) -> BrokerLinks:
        """To the broker, or to two while the fleet moves."""
        return links_to(shared, settings, rngs, [(way, Hears()) for way in ways])

    def changed(self, store: Store) -> Callable[[], bool]:
        """What tells whether the operator did something since it was asked last."""
        return store.database.changed_elsewhere


def assemble(
    home: AggregatorHome,
    store: Store,
    task: Task,
    world: World,
    role: Whole | None = None,
) -> Parts:
    """All parts, resumed from the store; the link is not started. Raises AggregatorError.

    ``task``: the first one; the others are in the home. ``role``: of a coordinator.
    """
    role = Whole() if role is None else role
    placement_of = role.placement_of
    settings = task.fleet
    clock, random_bytes = world.clock, world.random_bytes
    unix_clock = steady_clock(store, clock, world.unix_clock)
    # One each: links draw on threads of their own.
    link_rngs = world.rng.spawn(4)
    sealing_rng = link_rngs.pop(1)

    # Who may speak.
    keys = FleetKeys(home, store, clock, unix_clock, random_bytes, settings.descriptor_seconds)
    last_life = store.facts.announced_unix_seconds
    presence = role.begin_life(store, int(unix_clock()), random_bytes)
    shared = Shared(
        Registry(store.devices),
        Refusals(),
        Topics(settings.broker.prefix),
        clock,
        unix_clock,
        random_bytes,
        settings,
        store,
    )

    opens = Bounds.of(settings.admission.opens_share, clock)
    table = SessionTable(
        keys.keyring,
        presence.incarnation,
        opens.buckets,
        opens.budget,
        clock,
        unix_clock,
        random_bytes=random_bytes,
    )
    enrolments = Bounds.of(settings.admission.enrolments_share, clock)
    desk = EnrolmentDesk(
        keys.keyring,
        presence.incarnation,
        enrolments.buckets,
        enrolments.budget,
        unix_clock,
        placement_of=placement_of,
        marks=role.marks(store, presence),
        random_bytes=random_bytes,
    )
    keys.watch(table.replace_keyring)
    keys.watch(desk.replace_keyring)

    # What is learnt.
    def make(store: TaskStore, task: Task, *, failed: bool = False) -> TaskParts:
        shared_by_task = TaskShared.of(shared, task, store)
        return make_task(shared_by_task, keys, sealing_rng, role, failed=failed)

    reassembler, repeats = Reassembler(clock), Repeats(clock)
    inbox = Inbox(shared.refusals, repeats)
    board = TaskBoard(home, shared, make, inbox)
    board.begin(task)
    enrolment = Enrolment(
        desk,
        store,
        shared.registry,
        shared.refusals,
        unix_clock,
        lambda: store.facts.openings + 1,
        placement_of,
    )

    def told(device_id: bytes) -> Placement:
        most = link.packet_bytes or 0
        return replace(placement_of(device_id), mirror=settings.cluster.chunks, packet_bytes=most)

    if settings.cluster.chunks and not store.facts.mirrored:
        store.facts.mirrored = True
    place = settings.cluster.chunk_store
    if place and "://" not in place:
        place = str(home.folder / Path(place).expanduser())
    mirror = ChunkMirror(place, clock) if place else None
    watch = WatchMove(store, settings.broker.way, unix_clock)
    link = role.links(shared, world.link, link_rngs, watch.ways)
    return Parts(
        **vars(shared),
        link=link,
        table=table,
        uplink=Uplink(shared, table, reassembler, enrolment, repeats, keys.group_keys),
        inbox=inbox,
        tasks=board,
        announcements=Announcements(
            shared.topics, presence, lambda: board.names, keys.current, watch.announced
        ),
        move=watch,
        standings=Standings(shared, board, table),
        placements=Placements(shared, table, told, always=store.facts.mirrored),
        outgoing=Outgoing(link, store.retained, mirror),
        time=unix_clock,
        keys=keys,
        fence=Fence(presence, last_life, home.folder, keys.descriptors, clock, world.unix_clock),
        housekeeping=Housekeeping(
            shared, lambda: [each.upkeep for each in board.served], table, reassembler, mirror
        ),
        sleep=world.sleep,
        life=presence,
        changed=role.changed(store),
    )


def make_task(
    shared: TaskShared,
    keys: FleetKeys,
    rng: np.random.Generator,
    role: Whole,
    *,
    failed: bool = False,
) -> TaskParts:
    """A task's parts, resumed from its store. Raises AggregatorError.

    ``failed``: the task is held, and its method's code is not called.
    """
    task, store = shared.task, shared.store
    artifacts = read_artifacts(task)
    publisher = Publisher(shared, artifacts, keys.current, rng)
    catalogue = served_catalogue(store, task)
    parameters = tuple(each.artifact for each in artifacts)
    aggregation = role.aggregation(
        task.binding,
        store,
        0 if catalogue is None else len(catalogue),
        task.store.checkpoint_updates,
        publisher.require_publishable,
        parameters,
        VersionKeeper(
            store,
            task.models,
            task.ranking,
            task.warm_start,
            parameters,
            shared.unix_clock,
        ),
    )
    manifests = [each.manifest for each in parameters]
    for note in (task.note, taken_for_one([each.name for each in manifests])):
        if note:
            with about(task.name):
                LogEvent.TASK_NOTED.log(note=note)
    evaluator = Evaluator(store, task.name, task.evaluation, task.round.most_age)
    attendance = role.attendance(store, task.round)
    rounds = RoundMachine(
        shared, aggregation, publisher.seal_round, evaluator, attendance, failed=failed
    )
    upkeep = Upkeep(shared, aggregation, evaluator)
    if not failed:
        upkeep.begin(in_a_round=rounds.current is not None)
    ingest = Ingest(shared, rounds, aggregation, evaluator, ModelParts.of(manifests))
    return TaskParts(task, store, aggregation, rounds, ingest, publisher, upkeep)
