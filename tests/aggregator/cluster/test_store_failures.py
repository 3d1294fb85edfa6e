"""A worker whose store fails at the wrong moment."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.cluster.worker import Worker, WorkerParts
from aggregator.rounds.ingest import Settled
from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.store.rounds import RoundRow
from device_sdk.wire.publish.receipts import UpdateIdentity, write_update
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
            each._settle = self.said.extend  # type: ignore[method-assign]
        self.store = FailingConnection(self.worker._store)

    def offer(self, worker: WorkerParts, device: Device) -> None:
        worker.registry.look_up([device.id])
        identity = UpdateIdentity(device.id, "default", self.row.generation, 2)
        body = BODIES[1][device.number]
        settled = worker.inbox.offer(device.id, write_update(identity, body))
        self.said += [] if settled is None else [settled]

    def close_round(self) -> tuple[int, str]:
        """How many took part, and the state that came of it."""
        self.playing._later_seconds += 1000.0
        closed = self.rounds.tick()
        assert isinstance(closed, RoundClosed)
        return closed.summary.participants, self.playing.state()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    with closing(made.playing):
        yield made


VERDICT = "SELECT generation, round, device_id, body_sha256"


@pytest.mark.parametrize(
    ("fails", "answer_lost", "comes_twice"),
    [
        (["BEGIN", VERDICT], False, False),
        (["BEGIN", "SELECT round, seq, version, state", "BEGIN"], False, False),
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
