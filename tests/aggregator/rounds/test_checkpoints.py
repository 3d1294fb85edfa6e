"""A state written within a round: how often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from aggregator.home import AggregatorHome
from aggregator.methods.method import Method
from aggregator.methods.scatter import ScatterBinding, ScatterMethod, ScatterTable, initial_items
from aggregator.rounds.aggregation import Aggregation
from aggregator.rounds.late import Sent
from aggregator.rounds.machine import RoundOpened
from aggregator.serve.service import Parts
from aggregator.store import TaskStore
from aggregator.store.rows import DeviceRow, LoggedUpdate, RoundRow
from aggregator.store.versions import pack_state
from device_sdk.artifact import Artifact
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from tests.fakes.homes import ITEMS, WIDTH, make_home
from tests.fakes.parts import parts_of
from tests.fakes.scatter_updates import ONE_WIDTH, one_user

DEVICES = 40


class Binding(ScatterBinding):
    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        first = initial_items(items, WIDTH, 0.1, np.random.default_rng(0))
        return ScatterMethod(first, self.settings)


@pytest.fixture
def home(tmp_path: Path) -> AggregatorHome:
    made = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1")
    store = made.open_store()
    with store.database.transaction():
        for place in range(DEVICES):
            name = bytes([place]) * 16
            store.devices.add(DeviceRow(name, name * 2, name, name * 2, 0, name[:8], 0, 1))
    store.database.close()
    return made


@pytest.fixture
def parts(home: AggregatorHome) -> Iterator[Parts]:
    made = parts_of(home)
    assert isinstance(made.first.rounds.tick(), RoundOpened)
    yield made
    made.store.database.close()


def update(round_id: int, place: int) -> Update:
    rng = np.random.default_rng([round_id, place])
    pulls, vector = rng.standard_normal(ITEMS), rng.standard_normal(WIDTH)
    return Update(round_id, one_user(WIDTH, range(ITEMS), pulls, vector))


def logged(row: RoundRow, seq: int, place: int) -> LoggedUpdate:
    body = encode_scatter_update(update(row.round, place), WIDTH, "float32")
    return LoggedUpdate(seq, row.round, bytes([place]) * 16, 0.0, body)


class Desk:
    """An aggregation on a real store, and its open round."""

    def __init__(self, parts: Parts, updates: int) -> None:
        self.store: TaskStore = parts.store.first
        row = parts.first.rounds.current
        assert row is not None
        self.row = row
        self._updates = updates
        self.written: list[int] = []
        self.aggregation = self.start()

    def start(self) -> Aggregation:
        binding = Binding("scatter", ScatterTable(columns=WIDTH, least_squares=ONE_WIDTH))
        made = Aggregation(binding, self.store, ITEMS, self._updates, lambda broadcast: None)
        made.resume(self.row)
        return made

    def commit(self, places: range) -> None:
        for place in places:
            one = logged(self.row, self.aggregation.next_seq(), place)
            with self.store.database.transaction():
                self.store.log.append([one], [])
            sent = [Sent(one.body, one.device_id, self.row.round)]
            (decoded,) = self.aggregation.read_each(self.row, sent)
            assert isinstance(decoded, Update)
            assert not self.aggregation.absorb(self.row, [(one, decoded)])
            partial = self.store.checkpoints.get("partial")
            if partial is not None and partial.seq not in self.written:
                self.written.append(partial.seq)


def test_what_is_held_is_written_more_rarely_the_more_there_is(parts: Parts) -> None:
    desk = Desk(parts, 2)
    desk.commit(range(DEVICES))
    assert desk.written == [2, 4, 6, 8, 11, 16, 23, 34]
    again = desk.start()
    assert pack_state(again.state()) == pack_state(desk.aggregation.state())
