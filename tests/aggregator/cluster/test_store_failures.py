"""A worker whose store fails at the wrong moment."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.cluster.worker import Worker, WorkerParts
from aggregator.rounds.ingest import Settled
from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.store.rows import RoundRow
from device_sdk.wire.codec.message import MessageType, encode
from device_sdk.wire.publish.receipts import (
    RecordType,
    UpdateIdentity,
    with_report,
    write_update,
)
from device_sdk.wire.publish.report import Report, ReportedOutcome
from tests.aggregator.cluster.test_same_bits import factors, made, scatter_home
from tests.fakes.clusters import world
from tests.fakes.failing_store import FailingConnection
from tests.fakes.sealed_rounds import Device, SealedRounds

DEVICES = 3
BODIES = made(factors, 2, DEVICES)


class Scene:
    """Two workers in the second round, which is a sum; ``store`` is the first one's."""

    def __init__(self, folder: Path) -> None:
        self.devices = [Device(number) for number in range(DEVICES)]
        home = scatter_home(folder / "fleet", DEVICES, "")
        self.playing = SealedRounds(home, self.devices, 2, np.random.default_rng(1))
        self.playing.round(1, self.devices, BODIES[0], restarts=False)
        self.rounds = self.playing.parts.tasks.first.rounds
        opened = self.rounds.tick()
        assert isinstance(opened, RoundOpened)
        self.row: RoundRow = opened.row
        self.worker, self.other = self.playing.crew
        self.said: list[Settled] = []
        for each in self.playing.crew:
            each.look()
            each.link.sent.clear()
            each._answer = self.said.extend  # type: ignore[method-assign]
        self.store = FailingConnection(self.worker._store)

    def offer(self, worker: WorkerParts, device: Device) -> None:
        worker.registry.look_up([device.id])
        identity = UpdateIdentity(device.id, "default", self.row.generation, 2)
        body = BODIES[1][device.number]
        settled = worker.inbox.offer(device.id, write_update(identity, body))
        self.said += [] if settled is None else [settled]

    def close_round(self) -> tuple[int, str]:
        """How many took part, and the state that came of it."""
        self.playing._now_seconds += 300.0
        closed = self.rounds.tick()
        assert isinstance(closed, RoundClosed)
        return closed.summary.participants, self.playing.state()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    with closing(made.playing):
        yield made


VERDICT = "SELECT generation, round, device_id, body_sha256"
CHECKPOINT = "SELECT kind, round, seq, version, state FROM checkpoints"


@pytest.mark.parametrize(
    ("fails", "answer_lost", "comes_twice"),
    [
        (["BEGIN", VERDICT], False, False),
        (["BEGIN", CHECKPOINT, "BEGIN"], False, False),
        (["COMMIT", "COMMIT"], False, False),
        (["COMMIT"], False, True),
        ([VERDICT], True, False),
    ],
)
def test_what_was_absorbed_and_not_committed_is_not_counted_again(
    scene: Scene, tmp_path: Path, fails: list[str], answer_lost: bool, comes_twice: bool
) -> None:
    (tmp_path / "clean").mkdir()
    first, *rest = scene.devices
    scene.offer(scene.other, first)
    scene.other.commit()
    for device in scene.devices if comes_twice else rest:
        scene.offer(scene.worker, device)
    scene.store.fails, scene.store.answer_lost = list(fails), answer_lost
    failures = 0
    while scene.store.fails or scene.store.answer_lost or failures == 0:
        for device in rest:  # no receipt came: they send again
            scene.offer(scene.worker, device)
        try:
            scene.worker.commit()
        except sqlite3.Error:
            failures += 1
        else:
            break
    scene.worker.commit()
    assert scene.store.fails == [] and len(scene.worker.board.served[0].ingest) == 0
    assert {each.device_id for each in scene.said} == {each.id for each in scene.devices}
    assert {each.receipt.verdict.value for each in scene.said} == {"counted"}
    assert scene.playing.parts.store.first.shares.counts(2) == (DEVICES, DEVICES)
    clean = Scene(tmp_path / "clean")
    with closing(clean.playing):
        for device in clean.devices:
            clean.offer(clean.worker, device)
        clean.worker.commit()
        assert scene.close_round() == clean.close_round()


def test_a_round_that_ends_while_a_worker_tries_again_does_not_end_the_worker(
    scene: Scene,
) -> None:
    scene.offer(scene.other, scene.devices[0])
    scene.other.commit()
    for device in scene.devices:
        scene.offer(scene.worker, device)
    followed, store = scene.worker.board.served[0], scene.playing.parts.store
    try_each, tries = followed.keeper.try_each, []

    def try_late(*group: Any) -> Mapping[int, str]:
        tries.append(1)
        if len(tries) == 2:
            with store.database.transaction():
                store.first.rounds.end_entry(2, 1.0)
        return try_each(*group)

    followed.keeper.try_each = try_late  # type: ignore[method-assign]
    worker = Worker(scene.playing._posts[0], world())
    worker._work(scene.worker)
    assert worker.status().ended == "" and len(followed.ingest) == 0 and len(tries) == 2
    scene.worker.look()
    scene.offer(scene.worker, scene.devices[1])
    assert [each.receipt.verdict.value for each in scene.said] == ["counted", "counted", "late"]


def test_orders_that_come_while_the_store_fails_are_followed_when_it_is_back(scene: Scene) -> None:
    for device in scene.devices:
        scene.offer(scene.worker, device)
    worker = Worker(scene.playing._posts[0], world())
    before = scene.playing._orders
    orders = replace(
        before, tasks=tuple(replace(each, generation=each.generation + 1) for each in before.tasks)
    )
    worker.follow(2, orders)
    scene.worker.turn = lambda: None  # type: ignore[method-assign]
    scene.store.fails = ["COMMIT"] * 4
    turns = 0
    while worker.status().revision < 2 and turns < 10:
        worker._work(scene.worker)
        turns += 1
    assert scene.store.fails == [] and turns == 3
    assert [each.served for each in scene.worker.board.served] == list(orders.tasks)


def test_no_reply_to_an_open_leaves_before_its_counter_is_in_the_store(scene: Scene) -> None:
    device, worker = scene.devices[0], scene.worker
    known = worker._store.granted.of(device.id)
    opening = device.ask(scene.playing.parts)
    worker.link.came.append(opening)
    replied: list[bytes] = []
    scene.store.fails = ["INSERT INTO freshness", "COMMIT"]
    for turn in range(40):
        scene.playing._now_seconds += 0.02
        if turn == 20:
            worker.link.came.append(opening)  # its device heard nothing, and sends it again
        try:
            worker.turn()
        except sqlite3.Error:
            assert not worker.link.sent
        sent, worker.link.sent = worker.link.sent, []
        replied += [each for _, each in sent if each[1] == MessageType.SESSION_REPLY]
        if replied:
            assert worker._store.granted.of(device.id) == known + 1
    assert replied


def test_an_outcome_is_counted_once_however_often_its_commit_is_tried(scene: Scene) -> None:
    told = encode(Report(ReportedOutcome.TRAINED))
    for device in scene.devices:
        scene.worker.registry.look_up([device.id])
        identity = UpdateIdentity(device.id, "default", scene.row.generation, 2)
        content = with_report(told, BODIES[1][device.number])
        offered = scene.worker.inbox.offer(
            device.id, write_update(identity, content), RecordType.CONTRIBUTION
        )
        assert offered is None
    scene.store.fails = ["COMMIT"] * 3
    for _ in range(2):
        with suppress(sqlite3.Error):
            scene.worker.commit()
    store, ingest = scene.playing.parts.store.first, scene.worker.board.served[0].ingest
    assert dict(ingest.outcomes) == {("trained", ""): DEVICES}
    seen = {each: row.round for each, row in store.participations.all().items()}
    assert seen == {device.id: 2 for device in scene.devices}


def test_what_is_to_be_saved_is_kept_until_it_is_committed(scene: Scene) -> None:
    for device in scene.devices:
        scene.offer(scene.worker, device)
    scene.worker.commit()
    worker = scene.worker
    scene.store.fails = ["COMMIT"]
    worker._shared.refusals.note_reason("late", scene.devices[0].id)
    for _ in range(2):
        with suppress(sqlite3.Error), worker._store.database.transaction(shared=True):
            worker.board.served[0].ingest.save_seen()
            worker._shared.refusals.save(worker._store.refusals)
    store = scene.playing.parts.store
    counted = [row.counted_unix_seconds for row in store.first.participations.all().values()]
    assert len(counted) == DEVICES and None not in counted
    assert store.refusals.all()["late"] == 1
