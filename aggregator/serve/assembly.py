"""Puts the parts of a service together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aggregator.home import AggregatorHome
from aggregator.keys.enrolment import Enrolment
from aggregator.keys.fence import Fence
from aggregator.keys.fleet import FleetKeys
from aggregator.keys.registry import Registry
from aggregator.publish.publisher import PublishedTask, Publisher, read_artifacts
from aggregator.publish.standing import Announcements
from aggregator.refusals import Refusals
from aggregator.rounds.aggregation import Aggregation
from aggregator.rounds.ingest import Inbox, Ingest, Repeats
from aggregator.rounds.machine import RoundMachine
from aggregator.serve.broker_links import BrokerLinks
from aggregator.serve.housekeeping import Housekeeping, Upkeep
from aggregator.serve.outgoing import Outgoing
from aggregator.serve.service import Parts
from aggregator.serve.standings import Standings
from aggregator.serve.tasks import TaskBoard, TaskParts, claim
from aggregator.serve.uplink import Uplink
from aggregator.store import Store, TaskStore
from aggregator.task.file import Task, shipped_folder, stored_catalogue
from device_sdk.link.settings import LinkSettings
from device_sdk.wire.publish.chunks import Reassembler
from device_sdk.wire.publish.task_messages import TaskTerms
from device_sdk.wire.publish.topics import Topics
from device_sdk.wire.seal.admission import TokenBuckets, WorkBudget
from device_sdk.wire.seal.enrolment import EnrolmentDesk
from device_sdk.wire.seal.keys import RandomBytes
from device_sdk.wire.seal.presence import Presence, new_presence
from device_sdk.wire.seal.session_table import SessionTable

SHARD = 0
_BURST = 20.0
_REFILL_PER_SECOND = 0.2
LINK_SETTINGS = LinkSettings(
    backoff_first_seconds=0.5,
    backoff_most_seconds=10.0,
    in_flight=1024,
    send_queue_messages=16_384,
    send_queue_bytes=64 << 20,
    receive_maximum=2048,
    read_bytes=1 << 20,
)


@dataclass(frozen=True)
class World:
    """Time and chance. ``clock``: monotonic seconds; ``unix_clock``: Unix seconds."""

    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    rng: np.random.Generator
    random_bytes: RandomBytes = os.urandom
    sleep: Callable[[float], None] = time.sleep


def assemble(
    home: AggregatorHome,
    store: Store,
    task: Task,
    world: World,
    link_settings: LinkSettings = LINK_SETTINGS,
) -> Parts:
    """All parts, resumed from the store; the link is not started. Raises AggregatorError.

    ``task``: the first one; the others are in the home.
    """
    fleet = task.fleet
    clock, unix_clock, random_bytes = world.clock, world.unix_clock, world.random_bytes
    # One each: links draw on threads of their own.
    link_rngs = world.rng.spawn(4)
    sealing_rng = link_rngs.pop(1)
    topics, refusals = Topics(fleet.broker.prefix), Refusals()
    claim(store.first, task)

    # Who may speak.
    keys = FleetKeys(home, store, unix_clock, random_bytes, fleet.descriptor_seconds)
    registry = Registry(store.devices)
    last_life = store.facts.started_unix_seconds
    presence = _begin_life(store, int(unix_clock()), random_bytes)
    life = presence.incarnation
    table = SessionTable(
        keys.keyring,
        life,
        TokenBuckets(_BURST, _REFILL_PER_SECOND, clock),
        WorkBudget(fleet.admission.opens_share, clock),
        clock,
        unix_clock,
        random_bytes=random_bytes,
    )
    desk = EnrolmentDesk(
        keys.keyring,
        life,
        TokenBuckets(_BURST, _REFILL_PER_SECOND, clock),
        WorkBudget(fleet.admission.enrolments_share, clock),
        unix_clock,
        random_bytes=random_bytes,
    )
    keys.watch(table.replace_keyring)
    keys.watch(desk.replace_keyring)

    # What is learnt.
    make = _TaskMaker(registry, refusals, keys, topics, world, sealing_rng)
    reassembler, repeats = Reassembler(clock), Repeats(clock)
    inbox = Inbox(refusals, repeats)
    board = TaskBoard(home, store, make, inbox, unix_clock)
    board.begin(task)
    enrolment = Enrolment(
        desk, store, registry, refusals, unix_clock, lambda: store.facts.openings + 1
    )
    housekeeping = Housekeeping(
        store,
        lambda: [each.upkeep for each in board.served],
        table,
        reassembler,
        refusals,
        clock,
    )
    link = BrokerLinks(
        fleet.broker, topics, SHARD, registry, link_settings, link_rngs, random_bytes(16), clock
    )
    return Parts(
        fleet=fleet,
        store=store,
        link=link,
        registry=registry,
        table=table,
        uplink=Uplink(topics, registry, table, reassembler, enrolment, repeats, keys.group_keys),
        inbox=inbox,
        tasks=board,
        announcements=Announcements(topics, presence, keys.current),
        standings=Standings(registry, board, topics, table.seal_newest),
        outgoing=Outgoing(link, store.retained),
        refusals=refusals,
        keys=keys,
        fence=Fence(presence, last_life, home.folder, keys.descriptors, clock),
        housekeeping=housekeeping,
        clock=clock,
        sleep=world.sleep,
    )


@dataclass(frozen=True)
class _TaskMaker:
    """Makes a task's parts, resumed from its store. Raises AggregatorError."""

    registry: Registry
    refusals: Refusals
    keys: FleetKeys
    topics: Topics
    world: World
    rng: np.random.Generator

    def __call__(self, store: TaskStore, task: Task) -> TaskParts:
        artifacts = read_artifacts(task.artifacts, task.companions)
        terms = TaskTerms(
            task.binding.method_name,
            task.update_codec,
            task.round.train_seconds,
            tuple(each.offer() for each in artifacts),
        )
        shipped = shipped_folder()
        publisher = Publisher(
            PublishedTask(
                task.name,
                task.cohort,
                task.broadcast_codec,
                terms,
                artifacts,
                frozenset(
                    each.artifact_id
                    for each, folder in zip(artifacts, task.artifacts, strict=True)
                    if folder.parent == shipped
                ),
            ),
            self.topics,
            store,
            self.keys.current,
            self.registry.admission_key,
            self.world.random_bytes,
            self.rng,
        )
        catalogue = stored_catalogue(store)
        aggregation = Aggregation(
            task.binding,
            store,
            0 if catalogue is None else len(catalogue),
            task.store.checkpoint_updates,
            publisher.require_publishable,
            tuple(each.artifact for each in artifacts),
        )
        rounds = RoundMachine(
            task.name,
            task.round,
            task.selector,
            store,
            self.registry,
            aggregation,
            publisher.seal_round,
            self.world.unix_clock,
            self.world.random_bytes,
        )
        upkeep = Upkeep(store, aggregation, task.catalogue, task.store.verdict_days * 86_400.0)
        upkeep.begin(in_a_round=rounds.current is not None)
        ingest = Ingest(
            task.selector,
            task.binding,
            store,
            self.registry,
            rounds,
            aggregation,
            self.refusals,
            self.world.unix_clock,
        )
        return TaskParts(task, store, aggregation, rounds, ingest, publisher, upkeep)


def _begin_life(store: Store, now_unix_seconds: int, random_bytes: RandomBytes) -> Presence:
    """A presence that started after all before it in this home, whatever the calendar says."""
    last = store.facts.started_unix_seconds
    started = now_unix_seconds if last is None else max(now_unix_seconds, last + 1)
    presence = new_presence(started, random_bytes)
    with store.database.transaction():
        store.facts.started_unix_seconds = started  # before anybody hears of it
    return presence
