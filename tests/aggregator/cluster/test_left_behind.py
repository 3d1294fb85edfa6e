"""Workers without a coordinator go on for minutes: whoever takes the store over ends them first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from aggregator.cluster.serve import coordinate
from aggregator.cluster.worker import Worker, WorkerParts
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome, serve_lock
from aggregator.rounds.machine import RoundOpened
from aggregator.serve.alone import begin_alone
from aggregator.store import STORE_FAILURES, Store
from aggregator.store.cluster import Deposed
from aggregator.store.rows import RoundRow
from aggregator.task.file import read_task
from device_sdk.wire.publish.receipts import UpdateIdentity, write_update
from tests.aggregator.cluster.test_same_bits import factors, made, scatter_home
from tests.fakes.clusters import world
from tests.fakes.homes import command
from tests.fakes.outputs import error_of
from tests.fakes.sealed_rounds import Device, SealedRounds
from tests.servers.fixtures import MakeDatabase

DEVICES = 4


def _serve(home: AggregatorHome) -> None:
    with closing(home.open_store().database) as database:
        begin_alone(Store(database))


def _restored(home: AggregatorHome) -> None:
    assert command(home, "restored") == 0


@pytest.mark.parametrize("begin", [_serve, _restored])
def test_who_begins_alone_ends_them_before_they_count_anything_more(
    tmp_path: Path, store_url: str | None, begin: Callable[[AggregatorHome], None]
) -> None:
    home = scatter_home(tmp_path / "fleet", DEVICES, url=store_url)
    devices = [Device(number) for number in range(DEVICES)]
    first, second = made(factors, 2, DEVICES)
    with closing(SealedRounds(home, devices, 2, np.random.default_rng(1))) as playing:
        playing.round(1, devices, first, restarts=False)
        opened = playing.parts.tasks.first.rounds.tick()
        assert isinstance(opened, RoundOpened)
        begin(home)
        for worker in playing.crew:
            worker.look()
            with pytest.raises(Deposed, match="no cluster serves"):
                offer(worker, devices, opened.row, second)
                worker.stop()
        store = playing.parts.store
        assert store.first.shares.counts(2) == (0, 0)
        assert list(store.first.log.judged(opened.row.generation, 2)) == []


def test_sums_of_theirs_stay_theirs_until_a_cluster_has_counted_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = scatter_home(tmp_path / "fleet", DEVICES)
    devices = [Device(number) for number in range(DEVICES)]
    first, second = made(factors, 2, DEVICES)
    with closing(SealedRounds(home, devices, 1, np.random.default_rng(1))) as playing:
        playing.round(1, devices, first, restarts=False)
        opened = playing.parts.tasks.first.rounds.tick()
        assert isinstance(opened, RoundOpened)
        (worker,) = playing.crew
        worker.look()
        for part in (devices[:2], devices[2:]):
            offer(worker, part, opened.row, second)
            worker.commit()
            said = error_of(capsys, home, "serve").partition(": ")[2]
            assert "sums of a cluster's workers" in said
            assert f"wrong    serve    {said}" in _checked(capsys, home), "as serve says"
        assert playing.parts.store.first.shares.summed() == DEVICES
        with home.task_file.open("a") as file:
            file.write("[cluster]\nworkers = 3\n")
        assert f"warning  serve    {said}" in _checked(capsys, home), "a cluster goes on"
        assert playing.parts.store.lease.take("a machine", "1", 60.0) is not None
        assert "ok       serve    a cluster serves this fleet (a machine)" in _checked(capsys, home)


def _checked(capsys: pytest.CaptureFixture[str], home: AggregatorHome) -> str:
    assert command(home, "check") in (0, 1)
    return capsys.readouterr().out


def test_a_store_that_moves_leaves_them_behind(tmp_path: Path, make_database: MakeDatabase) -> None:
    home = scatter_home(tmp_path / "fleet", DEVICES)
    database = AggregatorHome(home.folder, make_database())
    for before, move in ((home, database.move_store), (database, database.move_store_back)):
        store = before.open_store()
        with closing(store.database):
            epoch = store.workers.start(0, "", "all", "1")
            term = store.lease.take("a machine", "1", 60.0)
            assert term is not None
            with pytest.raises(AggregatorError, match="a cluster serves this fleet"):
                move()
            store.lease.release(term)
            move()
            # The file is there no more, nor what is in the database.
            with pytest.raises((Deposed, *STORE_FAILURES)), store.database.transaction():
                store.workers.require(0, epoch)
            with pytest.raises((Deposed, *STORE_FAILURES)), store.database.transaction():
                store.lease.require(term)


def test_orders_of_a_life_that_is_over_start_no_worker(tmp_path: Path) -> None:
    home = scatter_home(tmp_path / "fleet", DEVICES)
    devices = [Device(number) for number in range(DEVICES)]
    with closing(SealedRounds(home, devices, 1, np.random.default_rng(1))) as playing:
        _serve(home)
        worker = Worker(playing._posts[0], world())
        worker.follow(1, playing._orders)
        with pytest.raises(Deposed, match="the coordinator was restarted"):
            worker.run(lambda: worker.status().epoch > 0)


def test_a_serve_that_began_meanwhile_is_seen_by_who_took_the_lease(tmp_path: Path) -> None:
    home = scatter_home(tmp_path / "fleet", DEVICES)
    with ExitStack() as serve:

        def join() -> bool:
            serve.enter_context(serve_lock(home))
            return True

        with pytest.raises(AggregatorError, match="a serve without --cluster"):
            coordinate(
                home,
                read_task(home.task_file),
                world(),
                lambda posts: pytest.fail("workers were hired"),
                lambda: False,
                join=join,
            )


def offer(
    worker: WorkerParts, devices: Sequence[Device], row: RoundRow, bodies: Sequence[bytes]
) -> None:
    for device in devices:
        worker.registry.look_up([device.id])
        identity = UpdateIdentity(device.id, "default", row.generation, row.round)
        worker.inbox.offer(device.id, write_update(identity, bodies[device.number]))
