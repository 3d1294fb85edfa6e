"""The same updates give the same model, bit for bit, over 1, 2 and 8 workers."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.cluster.coordinator import Coordinating, Crew, posts
from aggregator.cluster.orders import Orders
from aggregator.cluster.worker import WorkerParts
from aggregator.home import AggregatorHome
from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.serve.assembly import LINK_SETTINGS, assemble
from aggregator.store import Store
from aggregator.store.checkpoints import pack_state
from aggregator.store.devices import DeviceRow
from aggregator.task.cluster import Cell, Cluster
from aggregator.task.file import read_task
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.publish.receipts import UpdateIdentity, write_update
from device_sdk.wire.seal.placement import shard_of
from tests.fakes.clusters import world
from tests.fakes.homes import ITEMS, WIDTH, make_home
from tests.servers.fixtures import MakeDatabase

DEVICES, ROUNDS = 60, 3
ROUND = f"quorum = 2\nwait_for_devices = {DEVICES}\ndeadline_seconds = 600.0"


class Told:
    """Takes orders for workers that a test makes."""

    def tend(self, revision: int, orders: Orders) -> None:
        self.orders = orders


def _id(number: int) -> bytes:
    return hashlib.sha256(b"device %d" % number).digest()[:16]


def _body(round_number: int, number: int) -> bytes:
    rng = np.random.default_rng([round_number, number])
    tensors = {
        "columns": np.sort(rng.choice(WIDTH, size=4, replace=False)).astype(np.int64),
        "rows": np.sort(rng.choice(ITEMS, size=5, replace=False)).astype(np.int64),
        "values": rng.standard_normal((5, 4), dtype=np.float32),
    }
    return encode_scatter_update(Update(round_number, tensors), WIDTH, "int8", rng)


def _fill(store: Store) -> None:
    with store.database.transaction():
        store.facts.seed = 7
        for number in range(DEVICES):
            name = _id(number)
            key = name + name
            store.devices.add(DeviceRow(name, key, name, key, shard_of(name), name, 0, 1))


def _model(
    home: AggregatorHome, workers: int, restarts: bool = False, few: frozenset[int] = frozenset()
) -> str:
    """Play the rounds; the SHA-256 of the state that they end with. In rounds ``few`` one device
    comes, and the deadline ends them."""
    cluster = Cluster((Cell("", None, workers),))
    with closing(home.open_store().database) as database:
        _fill(Store(database))
    task = read_task(home.task_file)
    moved = [0.0]
    here = replace(world(), unix_clock=lambda: time.time() + moved[0])
    parts = assemble(home, home.open_store(), task, here, role=Coordinating(cluster))
    told = Told()
    Crew(told, home, parts).tend()
    where = posts(home, parts.store, cluster, task.fleet)
    chance = np.random.default_rng(workers)

    def made(slot: int) -> WorkerParts:
        store = where[slot].open_store()
        epoch = store.workers.start(slot, "", "", "")
        found = WorkerParts(where[slot], store, world(slot), LINK_SETTINGS, epoch, told.orders)
        found.take(told.orders)
        return found

    crew = [made(slot) for slot in range(workers)]
    rounds = parts.tasks.first.rounds
    for number in range(1, ROUNDS + 1):
        opened = rounds.tick()
        assert isinstance(opened, RoundOpened)
        for each in crew:
            each.look()
        coming = [number] if number in few else chance.permutation(DEVICES).tolist()
        for device in coming:
            slot = shard_of(_id(device)) % workers
            if restarts and chance.random() < 0.1:
                crew[slot].close()  # with what it did not commit
                crew[slot] = made(slot)
                crew[slot].look()
            identity = UpdateIdentity(_id(device), "default", opened.row.generation, number)
            payload = write_update(identity, _body(number, device))
            crew[slot].registry.look_up([_id(device)])  # its handle, too
            assert crew[slot].inbox.offer(_id(device), payload) is None
            if restarts or chance.random() < 0.3:
                crew[slot].commit()
        for each in crew:
            each.commit()
        moved[0] += 1000.0 if number in few else 0.0
        closed = rounds.tick()
        assert isinstance(closed, RoundClosed)
        carried = number - 1 in few
        assert closed.summary.participants == len(coming) + carried
    for each in crew:
        each.close()
    state = parts.tasks.first.aggregation.state()
    parts.store.database.close()
    return hashlib.sha256(pack_state(state)).hexdigest()


@pytest.mark.parametrize("robust", ["none", "median"])
def test_any_number_of_workers_and_either_store(
    tmp_path: Path, robust: str, make_database: MakeDatabase
) -> None:
    more = f'robust = "{robust}"\n[scatter.optimizer]\nname = "adam"'
    found = {}
    for workers in (1, 2, 8):
        (tmp_path / str(workers)).mkdir()
        home = make_home(tmp_path / str(workers), "mqtt://127.0.0.1:1", ROUND, more)
        found[workers] = _model(home, workers)
    (tmp_path / "again").mkdir()
    home = make_home(tmp_path / "again", "mqtt://127.0.0.1:1", ROUND, more)
    found[0] = _model(home, 2, restarts=True)
    (tmp_path / "postgres").mkdir()
    folder, url = tmp_path / "postgres", make_database()
    home = make_home(folder, "mqtt://127.0.0.1:1", ROUND, more, store_url=url)
    found[-1] = _model(home, 3, restarts=True)
    assert len(set(found.values())) == 1, found


def test_what_a_store_refuses_for_a_moment_is_committed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", ROUND)
    cluster = Cluster((Cell("", None, 1),))
    with closing(home.open_store().database) as database:
        _fill(Store(database))
    task = read_task(home.task_file)
    parts = assemble(home, home.open_store(), task, world(), role=Coordinating(cluster))
    told = Told()
    Crew(told, home, parts).tend()
    (post,) = posts(home, parts.store, cluster, task.fleet)
    store = post.open_store()
    epoch = store.workers.start(0, "", "", "")
    worker = WorkerParts(post, store, world(), LINK_SETTINGS, epoch, told.orders)
    worker.take(told.orders)
    rounds = parts.tasks.first.rounds
    opened = rounds.tick()
    assert isinstance(opened, RoundOpened)
    worker.look()
    monkeypatch.setattr("aggregator.store.sqlite._BUSY_SECONDS", 0.05)
    for device in range(DEVICES):
        identity = UpdateIdentity(_id(device), "default", opened.row.generation, 1)
        worker.registry.look_up([_id(device)])
        assert worker.inbox.offer(_id(device), write_update(identity, _body(1, device))) is None
        if device % 20 == 0:
            with parts.store.database.transaction(), pytest.raises(sqlite3.OperationalError):
                worker.commit()
            worker.commit()
    worker.commit()
    closed = rounds.tick()
    assert isinstance(closed, RoundClosed) and closed.summary.participants == DEVICES
    worker.close()
    parts.store.database.close()


@pytest.mark.parametrize("robust", ["none", "median"])
def test_what_a_round_without_quorum_leaves_is_in_the_next(tmp_path: Path, robust: str) -> None:
    found = set()
    for workers in (1, 2, 8):
        (tmp_path / str(workers)).mkdir()
        more = f'robust = "{robust}"'
        home = make_home(tmp_path / str(workers), "mqtt://127.0.0.1:1", ROUND, more)
        found.add(_model(home, workers, few=frozenset((2,))))
    assert len(found) == 1
