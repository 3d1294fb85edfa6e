"""Without a broker: the aggregator's updates and session opens a second, and bytes sent down."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.cli.serve import ease_collector
from aggregator.keys.registry import credential
from aggregator.methods.scatter import initial_items
from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.serve.assembly import World, assemble
from aggregator.serve.service import Parts
from aggregator.serve.uplink import Answer, Arrived
from aggregator.task.file import read_task
from benchmarks.aggregator.fleet import (
    ITEMS,
    WIDTH,
    BenchDevice,
    enrol_directly,
    make_bench_home,
    scatter_body,
    shown_incarnation,
)
from device_sdk.link.events import Message
from device_sdk.wire.arrays.tensors import Codec, encode_tensors
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.receipts import (
    RecordType,
    UpdateIdentity,
    Verdict,
    with_report,
    write_update,
)
from device_sdk.wire.publish.report import Details, Report, ReportedOutcome
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import SessionOpening

_SESSIONS = 500
_GROUP = 256


@dataclass(frozen=True)
class IngestFigures:
    """``seconds`` of the aggregator's work alone, and of processor time in them; sealing by the
    devices is not in it."""

    updates: int
    seconds: float
    cpu_seconds: float
    resident_mb_early: float
    resident_mb_late: float


def measure_ingest(updates: int, folder: Path, *, reports: bool = False) -> IngestFigures:
    """Ingest ``updates`` of 100 rows x 16, each from a device of its own for its round.

    ``reports``: each is a contribution with a usual report.

    Sessions belong to 500 devices; a device sends one update a round.
    """
    lines = "quorum = 1\ndeadline_seconds = 86400.0\n[admission]\nopens_share = 1.0"
    home = make_bench_home(folder, "mqtt://127.0.0.1:1", lines)
    store = home.open_store()
    rng = np.random.default_rng(2)
    devices = enrol_directly(store, updates, rng)
    later_seconds = 0.0
    world = World(
        lambda: time.monotonic() + later_seconds, lambda: time.time() + later_seconds, rng
    )
    parts = assemble(home, store, read_task(home.task_file), world)
    assert isinstance(parts.first.rounds.tick(), RoundOpened)
    ease_collector()  # as serve does
    bodies = [scatter_body(rng) for _ in range(64)]
    # A task's first round is held until its close: a later one is measured.
    assert _ingest(parts, list(_messages(parts, devices[:3], bodies, reports))) == 3
    for device in devices[:3]:
        parts.table.end(device.credential.device_id)
    later_seconds = 86400.0
    assert isinstance(parts.first.rounds.tick(), RoundClosed)
    assert isinstance(parts.first.rounds.tick(), RoundOpened)
    busy_seconds = cpu_seconds = 0.0
    early_mb = 0.0
    done = 0
    for start in range(0, updates, _SESSIONS):
        batch = devices[start : start + _SESSIONS]
        messages = list(_messages(parts, batch, bodies, reports))
        began, cpu_began = time.perf_counter(), time.process_time()
        done += _ingest(parts, messages)
        busy_seconds += time.perf_counter() - began
        cpu_seconds += time.process_time() - cpu_began
        for device in batch:
            parts.table.end(device.credential.device_id)
        if not early_mb and done >= 1000:
            early_mb = _resident_mb()
    assert done == updates == parts.first.aggregation.participants
    late_mb = _resident_mb()
    store.database.close()
    return IngestFigures(updates, busy_seconds, cpu_seconds, early_mb, late_mb)


def _ingest(parts: Parts, messages: list[Message]) -> int:
    counted = 0
    for start in range(0, len(messages), _GROUP):
        for message in messages[start : start + _GROUP]:
            arrived = parts.uplink.receive(message)
            assert isinstance(arrived, Arrived)
            settled = parts.inbox.offer(arrived.device_id, arrived.payload, arrived.record)
            assert settled is None
        counted += sum(s.receipt.verdict is Verdict.COUNTED for s in parts.first.ingest.commit())
    return counted


def _messages(
    parts: Parts, batch: list[BenchDevice], bodies: list[bytes], reports: bool
) -> Iterator[Message]:
    row = parts.first.rounds.current
    assert row is not None
    descriptor = parts.keys.current().descriptor
    freshness = Freshness(shown_incarnation(parts), 1)
    for index, device in enumerate(batch):
        opening = SessionOpening(device.credential, descriptor, freshness, time.monotonic)
        known = credential(parts.registry.by_handle(device.handle))
        reply = parts.table.accept_open(known, opening.message, parts.keys.group_keys())
        session = opening.accept(reply, 0).session
        identity = UpdateIdentity(device.credential.device_id, "default", row.generation, row.round)
        body, record = bodies[index % len(bodies)], RecordType.UPDATE
        if reports:
            # Seconds and bytes differ from device to device, as they do.
            details = Details("0.1.0", "1.22.0", "linux-aarch64", "k=16", index / 64, 9000 + index)
            told = encode(Report(ReportedOutcome.TRAINED, "", details))
            body, record = with_report(told, body), RecordType.CONTRIBUTION
        payload = write_update(identity, body)
        yield Message(device.up_topic, session.seal(record, payload), False)


def _resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def measure_opens(count: int, folder: Path) -> float:
    """Opens a second: registry, admission, HPKE both ways, signatures, session table.

    They may take all of the time here, which a service would not let them.
    """
    rng = np.random.default_rng(3)
    lines = "deadline_seconds = 86400.0\n[admission]\nopens_share = 1.0"
    home = make_bench_home(folder, "mqtt://127.0.0.1:1", lines)
    store = home.open_store()
    devices = enrol_directly(store, count, rng)
    world = World(time.monotonic, time.time, rng)
    parts = assemble(home, store, read_task(home.task_file), world)
    descriptor = parts.keys.current().descriptor
    freshness = Freshness(shown_incarnation(parts), 1)
    messages = [
        Message(
            device.up_topic,
            SessionOpening(device.credential, descriptor, freshness, time.monotonic).message,
            False,
        )
        for device in devices
    ]
    began = time.perf_counter()
    replies = [parts.uplink.receive(message) for message in messages]
    seconds = time.perf_counter() - began
    assert all(isinstance(reply, Answer) for reply in replies)
    store.database.close()
    return count / seconds


def measure_downlink() -> dict[str, int]:
    """Bytes of the item matrix by encoding: ``float16``, ``int8`` and ``int4``."""
    rng = np.random.default_rng(6)
    items = initial_items(ITEMS, WIDTH, 0.1, rng)
    return {
        codec.name.lower(): len(encode_tensors({"items": items}, codec, rng))
        for codec in (Codec.FLOAT16, Codec.INT8, Codec.INT4)
    }
