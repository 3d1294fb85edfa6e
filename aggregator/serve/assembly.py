"""Puts the parts of a service together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.enrolment import Enrolment
from aggregator.keys.fence import Fence
from aggregator.keys.fleet import FleetKeys
from aggregator.keys.registry import Registry
from aggregator.publish.publisher import Publisher, read_artifacts
from aggregator.refusals import Refusals
from aggregator.rounds.aggregation import Aggregation
from aggregator.rounds.ingest import Ingest, Repeats
from aggregator.rounds.machine import RoundMachine
from aggregator.serve.broker_links import BrokerLinks
from aggregator.serve.housekeeping import Housekeeping
from aggregator.serve.outgoing import Outgoing
from aggregator.serve.service import Parts
from aggregator.serve.uplink import Uplink
from aggregator.shared import Shared
from aggregator.store import Store
from aggregator.task.file import Task, read_continued_catalogue, stored_catalogue
from device_sdk.link.settings import LinkSettings
from device_sdk.wire.publish.chunks import Reassembler
from device_sdk.wire.publish.topics import Topics
from device_sdk.wire.seal.admission import TokenBuckets, WorkBudget
from device_sdk.wire.seal.enrolment import EnrolmentDesk
from device_sdk.wire.seal.keys import RandomBytes
from device_sdk.wire.seal.presence import Presence, new_presence
from device_sdk.wire.seal.session_table import SessionTable
from device_sdk.wire.seal.tasks import ServedTasks

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
    """All parts, resumed from the store; the link is not started. Raises AggregatorError."""
    _claim(store, task)
    clock, unix_clock, random_bytes = world.clock, world.unix_clock, world.random_bytes
    # One each: links draw on threads of their own.
    link_rngs = world.rng.spawn(4)
    sealing_rng = link_rngs.pop(1)

    # Who may speak.
    keys = FleetKeys(home, store, unix_clock, random_bytes, task.descriptor_seconds)
    last_life = store.facts.started_unix_seconds
    presence = _begin_life(store, int(unix_clock()), random_bytes)
    shared = Shared(
        task,
        store,
        Registry(store.devices),
        Refusals(),
        Topics(task.broker.prefix),
        clock,
        unix_clock,
        random_bytes,
    )

    def bounds(share: float) -> tuple[TokenBuckets, WorkBudget]:
        return TokenBuckets(_BURST, _REFILL_PER_SECOND, clock), WorkBudget(share, clock)

    life = keys.keyring, presence.incarnation
    opens, enrolments = map(bounds, (task.admission.opens_share, task.admission.enrolments_share))
    table = SessionTable(*life, *opens, clock, unix_clock, random_bytes=random_bytes)
    desk = EnrolmentDesk(*life, *enrolments, unix_clock, random_bytes=random_bytes)
    keys.watch(table.replace_keyring)
    keys.watch(desk.replace_keyring)

    # What is published, and what comes back.
    artifacts = read_artifacts(task.artifacts, task.companions)
    served = ServedTasks(presence.incarnation, 0, ((task.name, task.cohort),))
    publisher = Publisher(shared, artifacts, presence, served, keys.current, sealing_rng)
    catalogue = stored_catalogue(store)
    aggregation = Aggregation(
        task.binding,
        store,
        0 if catalogue is None else len(catalogue),
        task.store.checkpoint_updates,
        publisher.require_publishable,
        tuple(each.artifact for each in artifacts),
    )
    rounds = RoundMachine(shared, aggregation, publisher.seal_round)
    reassembler, repeats = Reassembler(clock), Repeats(clock)
    enrolment = Enrolment(
        desk, store, shared.registry, shared.refusals, unix_clock, rounds.next_number
    )
    housekeeping = Housekeeping(shared, aggregation, table, reassembler)
    housekeeping.begin(in_a_round=rounds.current is not None)
    link = BrokerLinks(shared, SHARD, link_settings, link_rngs)
    return Parts(
        **vars(shared),
        link=link,
        table=table,
        uplink=Uplink(shared, table, reassembler, enrolment, repeats, keys.group_keys),
        aggregation=aggregation,
        rounds=rounds,
        ingest=Ingest(shared, rounds, aggregation, repeats),
        publisher=publisher,
        outgoing=Outgoing(link, store.publications),
        keys=keys,
        fence=Fence(presence, last_life, home.folder, keys.descriptors, clock),
        housekeeping=housekeeping,
        sleep=world.sleep,
    )


def _begin_life(store: Store, now_unix_seconds: int, random_bytes: RandomBytes) -> Presence:
    """A presence that started after all before it in this home, whatever the calendar says."""
    last = store.facts.started_unix_seconds
    started = now_unix_seconds if last is None else max(now_unix_seconds, last + 1)
    presence = new_presence(started, random_bytes)
    with store.database.transaction():
        store.facts.started_unix_seconds = started  # before anybody hears of it
    return presence


def _claim(store: Store, task: Task) -> None:
    """The first ``serve`` decides which task the stored state belongs to."""
    label = f"{task.name} {task.binding.method_name}"
    stored = store.facts.task
    if stored is not None and stored != label:
        raise AggregatorError(
            f"this home holds the state of task and method {stored!r}, the task file names "
            f"{label!r}: use another --home for another task"
        )
    missing = task.catalogue is not None and store.facts.catalogue is None
    if stored is None or missing:
        with store.database.transaction():
            store.facts.task = label
            if task.catalogue is not None:
                found = read_continued_catalogue(task.catalogue, store)
                store.facts.catalogue = found.to_bytes()
