"""An update that a method's check lets through and its absorb does not, on a worker."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.cluster.coordinator import Coordinating, Crew, posts
from aggregator.cluster.worker import WorkerParts
from aggregator.home import AggregatorHome
from aggregator.methods.method import Method
from aggregator.methods.scatter import ScatterBinding, ScatterMethod, ScatterTable, initial_items
from aggregator.rounds.ingest import Settled
from aggregator.rounds.machine import RoundClosed, RoundHeld, RoundOpened, held
from aggregator.serve.assembly import assemble
from aggregator.serve.service import Parts
from aggregator.store import Store
from aggregator.store.versions import pack_state
from aggregator.task.cluster import Cell, Cluster
from aggregator.task.file import read_task
from device_sdk.artifact import Artifact
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.receipts import UpdateIdentity, write_update
from tests.aggregator.cluster.test_left_behind import offer
from tests.aggregator.cluster.test_same_bits import factors, made, scatter_home
from tests.fakes import sealed_rounds
from tests.fakes.clusters import world
from tests.fakes.homes import WIDTH, command
from tests.fakes.scatter_updates import ONE_WIDTH, one_user
from tests.fakes.sealed_rounds import Device, SealedRounds, Told

DEVICES = 60

BAD = 7
"""Its update cannot be absorbed, and that is found out when half of it was."""


class HalfAbsorbed(ScatterMethod):
    """Adds large values, too, and raises then."""

    def _absorb(self, updates: Sequence[Update]) -> None:
        for update in updates:
            super()._absorb([update])
            if np.abs(update.tensors["pulls"]).max() > 2:
                raise MemoryError("no room for large values")


class HalfAbsorbedBinding(ScatterBinding):
    """Builds that method."""

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        return HalfAbsorbed(initial_items(items, WIDTH, 0.1, rng), self.settings)


def _body(number: int) -> bytes:
    value = 2.5 if number == BAD else 1.0 + number / 256
    tensors = one_user(WIDTH, range(2), np.full(2, value), 1.0, range(3))
    return encode_scatter_update(Update(1, tensors), WIDTH, "float32")


def _model(home: AggregatorHome, *, with_bad: bool) -> str:
    """Two rounds; the SHA-256 of the state that they end with."""
    cluster = Cluster((Cell("", None, 1),))
    with closing(home.open_store().database) as database, database.transaction():
        Store(database).facts.seed = 7
        for number in range(DEVICES):
            Store(database).devices.add(Device(number).row())
    binding = HalfAbsorbedBinding(
        "scatter", ScatterTable(columns=WIDTH, spread=0.1, least_squares=ONE_WIDTH)
    )
    task = replace(read_task(home.task_file), binding=binding)
    moved = [0.0]
    here = replace(world(), clock=lambda: time.monotonic() + moved[0])
    parts = assemble(home, home.open_store(), task, here, role=Coordinating(cluster))
    told = Told()
    Crew(told, home, parts).tend()
    (post,) = posts(home, parts.store, cluster, task.fleet)
    store = post.open_store()
    epoch = store.workers.start(0, "", "", "")
    worker = WorkerParts(post, store, world(), epoch, told.orders)
    worker.take(told.orders)
    said: list[Settled] = []
    worker._answer = said.extend  # type: ignore[method-assign]
    coming = [device for device in range(DEVICES) if with_bad or device != BAD]
    rounds = parts.tasks.first.rounds
    # The first round keeps bodies, those after it are sums.
    for number, adds_up in ((1, False), (2, True)):
        opened = rounds.tick()
        assert isinstance(opened, RoundOpened)
        worker.look()
        said.clear()
        for device in coming:
            identity = UpdateIdentity(Device(device).id, "default", opened.row.generation, number)
            worker.registry.look_up([Device(device).id])
            assert (
                worker.inbox.offer(Device(device).id, write_update(identity, _body(device))) is None
            )
            if device in (DEVICES // 3, DEVICES // 2):
                worker.commit()
        worker.commit()
        assert parts.store.first.shares.counts(number) == (DEVICES - 1, len(coming))
        assert parts.store.first.shares.summed() == (DEVICES - 1) * adds_up
        if with_bad:
            _is_refused_and_holds_the_round(home, parts, said, number)
        else:
            moved[0] += 1000.0  # it is waited for in vain
        closed = rounds.tick()
        assert isinstance(closed, RoundClosed) and closed.summary.participants == DEVICES - 1
    worker.close()
    state = parts.tasks.first.aggregation.state()
    parts.store.database.close()
    return hashlib.sha256(pack_state(state)).hexdigest()


def _is_refused_and_holds_the_round(
    home: AggregatorHome, parts: Parts, said: list[Settled], number: int
) -> None:
    verdicts = {each.device_id: (each.receipt.verdict.value, each.receipt.reason) for each in said}
    assert len(verdicts) == DEVICES
    assert verdicts.pop(Device(BAD).id) == ("refused", "quarantined")
    assert set(verdicts.values()) == {("counted", "")}
    rounds, log = parts.tasks.first.rounds, parts.store.first.log
    known = log.verdict(rounds.generation, number, Device(BAD).id)
    assert known is not None and known.reason == "quarantined"
    assert [each[:2] for each in log.quarantined()] == [(number, Device(BAD).id)]
    held = rounds.tick()
    assert isinstance(held, RoundHeld) and "no room for large values" in held.why
    assert rounds.tick() is None
    assert command(home, "release") == 0 and log.quarantined() == []
    rounds.reload_hold()


def test_what_cannot_be_absorbed_is_refused_before_its_receipt_and_leaves_nothing(
    tmp_path: Path, store_url: str | None
) -> None:
    found = []
    for with_bad in (True, False):
        url = store_url if with_bad else None
        home = scatter_home(tmp_path / str(with_bad), DEVICES, "", url=url)
        found.append(_model(home, with_bad=with_bad))
    assert found[0] == found[1]


def test_many_that_cannot_be_absorbed_cost_no_more_than_as_many_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, absorbed = 60, []
    binding = HalfAbsorbedBinding(
        "scatter", ScatterTable(columns=WIDTH, spread=0.1, least_squares=ONE_WIDTH)
    )
    monkeypatch.setattr(
        sealed_rounds, "read_task", lambda file: replace(read_task(file), binding=binding)
    )
    absorb = HalfAbsorbed.absorb

    def counted(method: HalfAbsorbed, update: Update) -> None:
        absorbed.append(update)
        absorb(method, update)

    monkeypatch.setattr(HalfAbsorbed, "absorb", counted)
    devices = [sealed_rounds.Device(number) for number in range(many)]
    home = scatter_home(tmp_path / "fleet", many, "")
    rng = np.random.default_rng(1)
    with closing(sealed_rounds.SealedRounds(home, devices, 1, rng)) as playing:
        (worker,) = playing.crew
        said: list[Settled] = []
        worker._answer = said.extend  # type: ignore[method-assign]
        opened = playing.parts.tasks.first.rounds.tick()
        assert isinstance(opened, RoundOpened)
        worker.look()
        for device in devices:
            worker.registry.look_up([device.id])
            identity = UpdateIdentity(device.id, "default", opened.row.generation, 1)
            content = write_update(identity, _body(BAD if device.number % 2 else 1))
            assert worker.inbox.offer(device.id, content) is None
        worker.commit()
        assert Counter(each.receipt.reason for each in said) == {"quarantined": 30, "": 30}
        assert playing.parts.store.first.shares.counts(1) == (30, many)
    assert len(absorbed) < 4 * many


@pytest.mark.parametrize("call", ["check_each", "share", "open_round"])
def test_a_method_that_fails_on_a_worker_holds_its_task_and_ends_no_worker(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = scatter_home(tmp_path / "fleet", 4)
    devices = [Device(number) for number in range(4)]
    first, second = made(factors, 2, 4)
    with closing(SealedRounds(home, devices, 1, np.random.default_rng(1))) as playing:
        playing.round(1, devices, first, restarts=False)
        opened = playing.parts.tasks.first.rounds.tick()
        assert isinstance(opened, RoundOpened)
        (worker,) = playing.crew
        store = playing.parts.store.first

        def fail(self: Method, *given: object) -> object:
            raise SystemExit(f"{call} as the test wants")

        with monkeypatch.context() as patched:
            patched.setattr(ScatterMethod, call, fail)
            worker.look()
            with suppress(WireError):
                offer(worker, devices, opened.row, second)
            worker.commit()
            worker.look()
            assert f"the method's {call} raised SystemExit: {call} as" in str(held(store))
            assert store.shares.counts(2) == (0, 0)
            # Nothing is said of it, and the coordinator waits too.
            with pytest.raises(WireError, match="not known to this worker"):
                offer(worker, devices[:1], opened.row, second)
            playing.parts.tasks.look_again()
            assert playing.parts.tasks.first.rounds.tick() is None
        assert command(home, "release") == 0
        playing.parts.tasks.look_again()
        worker.look()
        offer(worker, devices, opened.row, second)
        worker.commit()
        closed = playing.parts.tasks.first.rounds.tick()
        assert isinstance(closed, RoundClosed) and closed.summary.participants == 4
