"""The rows that a worker holds: those of the devices it has to do with, as the store has them."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aggregator.keys.registry import HeldRegistry, Registry, revoke
from aggregator.store import Store, StoreError, create_database, devices, open_database
from aggregator.store.rows import DeviceRow
from device_sdk.wire.codec.errors import WireError


def row_of(number: int) -> DeviceRow:
    name = hashlib.sha256(b"%d" % number).digest()
    return DeviceRow(name[:16], name, name[16:], name, 5, name[:8], number, 1)


def enrol(store: Store, numbers: range) -> list[DeviceRow]:
    rows = [row_of(number) for number in numbers]
    with store.database.transaction():
        for row in rows:
            store.devices.add(row)
    return rows


@pytest.fixture
def store(tmp_path: Path, store_url: str | None) -> Iterator[Store]:
    made = Store(create_database(store_url or tmp_path / "store.db"))
    yield made
    made.database.close()


def reason(registry: HeldRegistry, row: DeviceRow) -> str:
    with pytest.raises(WireError) as caught:
        registry.by_handle(row.handle)
    return caught.value.reason


def test_rows_are_read_when_asked_for_and_many_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = enrol(store, range(600))
    held = HeldRegistry(store.devices)
    assert len(held) == 0 and reason(held, rows[0]) == "unknown-handle"
    asked: list[str] = []
    ask = store.database.rows
    monkeypatch.setattr(
        store.database, "rows", lambda sql, values=(): asked.append(sql) or ask(sql, values)
    )
    strangers = [row_of(number).handle for number in range(600, 700)]
    found = held.look_up([row.handle for row in rows[:500]] + strangers)
    assert sorted(found) == sorted(row.device_id for row in rows[:500])
    assert len(asked) == 3, "600 handles, 256 at a time"
    assert held.look_up([row.handle for row in rows[:500]]) == [] and len(asked) == 3
    assert all(held.by_handle(row.handle) == row for row in rows[:500])
    assert reason(held, rows[500]) == "unknown-handle"


@pytest.mark.parametrize("kept_changes", [1, 1000], ids=["all", "changes"])
@pytest.mark.parametrize("whole", [False, True], ids=["held", "whole"])
@pytest.mark.parametrize("read", [0, 2])
def test_who_is_revoked_while_the_store_fails_is_noticed_when_it_is_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, kept_changes: int, whole: bool, read: int
) -> None:
    rows = enrol(store, range(4))
    registry = Registry(store.devices) if whole else HeldRegistry(store.devices)
    if isinstance(registry, HeldRegistry):
        registry.look_up([row.handle for row in rows])
    monkeypatch.setattr(devices, "_KEPT_CHANGES", kept_changes)
    gone = sorted(row.device_id for row in rows[:3])
    for device_id in gone:
        with store.database.transaction():
            revoke(store, device_id, 9)
    ask, table = store.database.rows, " FROM devices "

    def fails(sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        if table not in sql:
            return ask(sql, values)
        return chain(islice(ask(sql, values), read), _lost())

    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(store.database, "rows", fails)
        registry.refresh()
    assert [row.device_id for row in registry.refresh()] == gone
    assert [row.device_id for row in registry.devices()] == [rows[3].device_id]


def _lost() -> Iterator[tuple[Any, ...]]:
    raise StoreError("the connection was lost")
    yield ()


class Held(RuleBasedStateMachine):
    """What is held is what the store has, whatever was read when; changes are told of once."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = Store(create_database(self.folder / "store.db"))
        self.other = Store(open_database(self.folder / "store.db"))
        self.kept, devices._KEPT_CHANGES = devices._KEPT_CHANGES, 4
        self.registry = HeldRegistry(self.store.devices)
        self.count = 0
        self.revoked: set[bytes] = set()

    def teardown(self) -> None:
        devices._KEPT_CHANGES = self.kept
        self.store.database.close()
        self.other.database.close()
        shutil.rmtree(self.folder)

    def pick(self, numbers: set[int]) -> list[DeviceRow]:
        return [row_of(number) for number in sorted(numbers) if number < self.count]

    @rule(count=st.integers(1, 6))
    def enrol(self, count: int) -> None:
        enrol(self.other, range(self.count, self.count + count))
        self.count += count

    @rule(numbers=st.sets(st.integers(0, 15), max_size=3))
    def revoke(self, numbers: set[int]) -> None:
        for row in self.pick(numbers):
            with self.other.database.transaction():
                revoke(self.other, row.device_id, 7)
            self.revoked.add(row.device_id)

    @rule(numbers=st.sets(st.integers(0, 15), max_size=3), site=st.sampled_from("ab"))
    def label(self, numbers: set[int], site: str) -> None:
        for row in self.pick(numbers):
            with self.other.database.transaction():
                self.other.devices.set_labels(row.device_id, {"site": site})

    @rule(numbers=st.sets(st.integers(0, 20), max_size=8))
    def look_up(self, numbers: set[int]) -> None:
        before = {row.device_id for row in self.registry.devices()}
        found = self.registry.look_up([row_of(number).handle for number in numbers])
        wanted = {row.device_id for row in self.pick(numbers)}
        assert set(found) == wanted - self.revoked - before

    @rule()
    def refresh(self) -> None:
        before = {row.device_id for row in self.registry.devices()}
        gone = [row.device_id for row in self.registry.refresh()]
        assert set(gone) == before & self.revoked and len(gone) == len(set(gone))
        for row in self.registry.devices():
            assert row == self.store.devices.find(row.device_id)

    @rule(needed=st.sets(st.integers(0, 15)))
    def let_go(self, needed: set[int]) -> None:
        before = {row.device_id for row in self.registry.devices()}
        stay = {row_of(number).device_id for number in needed}
        gone = set(self.registry.let_go(stay.__contains__))
        assert gone <= before - stay
        assert {row.device_id for row in self.registry.devices()} == before - gone

    @invariant()
    def both_ways_lead_to_the_same(self) -> None:
        rows = list(self.registry.devices())
        assert all(self.registry.by_handle(row.handle) is row for row in rows)
        assert len(self.registry) == len(rows)


TestHeld = Held.TestCase
TestHeld.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
