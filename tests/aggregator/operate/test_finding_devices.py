"""Devices are found by what they are called, where they are and how they do; a page of them costs
no more in a large fleet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator import Fleet
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.operate.devices import DevicesFound, DeviceState, FleetDevice
from aggregator.store.rows import DeviceRow, LastParticipation
from aggregator.store.sqlite import SQLiteDatabase
from tests.fakes.homes import make_home

NOW = int(time.time())
_DAY = 86_400
_COUNT = 150


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> AggregatorHome:
    """Devices by chance, of few kinds, near the edges of what makes out their states."""
    made = make_home(tmp_path_factory.mktemp("found"), "mqtt://127.0.0.1:1")
    store, rng = made.open_store(), np.random.default_rng(7)
    times = (NOW, NOW - 1, NOW - _DAY + 1, NOW - _DAY, NOW - _DAY - 1, NOW - 3 * _DAY)
    names = (None, "Hall", "hall-2", "Été", '"quoted"', "100%_a")

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    with store.database.transaction():
        for place in range(_COUNT):
            name = rng.bytes(16)
            labels = {"site": one("north", "North", "south"), "line": one("a", "b", "nor")}
            store.devices.add(
                DeviceRow(
                    name,
                    name * 2,
                    name,
                    bytes(32),
                    0,
                    name[:8],
                    one(*times),
                    1,
                    one(None, None, None, NOW),
                    labels if place % 7 else {},
                    one(*names),
                )
            )
            if one(True, False):
                store.devices.note_seen({name: one(*times)})
            if one(True, False, False):
                store.devices.note_clashes({name: one(*times)})
            if one(True, False):
                store.first.participations.note({name: LastParticipation(NOW, 4)})
        served = '[broker]\nurl = "mqtt://here"\n[task]\nonly = {site = ["north", "south"]}\n'
        store.tasks.change(1, name="default", served=served)
    store.database.close()
    return made


@pytest.fixture
def fleet(home: AggregatorHome) -> Iterator[Fleet]:
    with Fleet.open(home.folder, clock=lambda: NOW + 0.5) as found:
        yield found


def _ids(found: DevicesFound) -> list[str]:
    return [each.device_id for each in found.devices]


def _wanted(fleet: Fleet, fits: Any) -> list[str]:
    return [each.device_id for each in fleet.devices() if fits(each)]


@pytest.mark.parametrize("state", DeviceState)
def test_a_state_is_the_same_whether_it_is_looked_for_or_told(
    fleet: Fleet, state: DeviceState
) -> None:
    found = fleet.find_devices(state=state, most=_COUNT)
    wanted = _wanted(fleet, lambda each: each.state is state)
    assert wanted and sorted(_ids(found)) == sorted(wanted)
    assert found.total == found.states[state] == len(wanted)
    assert sum(found.states.values()) == _COUNT


@pytest.mark.parametrize("text", ["hall", "HALL-2", "É", "é", '"quoted"', "%_", "nor", "'", "\\"])
def test_text_is_found_in_names_and_labels_whatever_the_case_of_its_letters(
    fleet: Fleet, text: str
) -> None:
    def low(value: str) -> str:
        return "".join(each.lower() if each.isascii() else each for each in value)

    def fits(device: FleetDevice) -> bool:
        told = [device.name or "", *device.labels, *device.labels.values()]
        return any(low(text) in low(each) for each in told)

    wanted = _wanted(fleet, fits)
    if text == '"quoted"':
        assert wanted
        assert set(wanted) <= set(_ids(fleet.find_devices(text, most=_COUNT)))
    else:
        assert sorted(_ids(fleet.find_devices(text, most=_COUNT))) == sorted(wanted)


def test_the_first_digits_of_an_id_are_found_an_odd_number_of_them_too(fleet: Fleet) -> None:
    device_id = fleet.devices()[3].device_id
    for digits in (device_id, device_id[:7].upper(), device_id[:6]):
        assert device_id in _ids(fleet.find_devices(digits, most=_COUNT))
        assert fleet.device(digits).device_id == device_id
    assert not fleet.find_devices(device_id + "0").devices
    for none in (device_id + "0", "zz", "", " "):
        with pytest.raises(AggregatorError, match="no device named"):
            fleet.device(none)


def test_labels_must_be_as_they_were_given(fleet: Fleet) -> None:
    labels = {"site": "north", "line": "a"}
    found = fleet.find_devices(labels=labels, most=_COUNT)
    wanted = _wanted(fleet, lambda each: labels.items() <= each.labels.items())
    assert wanted and sorted(_ids(found)) == sorted(wanted)
    assert not fleet.find_devices(labels={"site": "nort"}).devices
    assert not fleet.find_devices(labels={"site": 'north", "x": "'}).devices


def test_of_a_task_are_those_that_it_is_for_and_those_that_took_part(fleet: Fleet) -> None:
    found = fleet.find_devices(task="default", most=_COUNT)
    wanted = _wanted(fleet, lambda each: bool(each.tasks))
    assert 0 < len(wanted) < _COUNT and sorted(_ids(found)) == sorted(wanted)
    with pytest.raises(AggregatorError, match="has no task 'air'"):
        fleet.find_devices(task="air")


def test_pages_are_the_whole_list_in_parts(fleet: Fleet) -> None:
    whole = [each.device_id for each in fleet.devices()]
    parts = [fleet.find_devices(first=first, most=40) for first in range(0, _COUNT, 40)]
    assert [each for part in parts for each in _ids(part)] == whole
    assert {each.total for each in parts} == {_COUNT}
    assert fleet.find_devices(first=40, most=1).devices[0] == fleet.devices()[40]
    assert not fleet.find_devices(first=10**9).devices


def test_a_page_reads_no_more_of_a_larger_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store, read = home.open_store(), [0]
    rows = SQLiteDatabase.rows

    def counted(self: SQLiteDatabase, sql: str, values: Any = ()) -> Iterator[tuple[Any, ...]]:
        for row in rows(self, sql, values):
            read[0] += 1
            yield row

    monkeypatch.setattr(SQLiteDatabase, "rows", counted)
    costs = []
    for begin in (0, 300):
        with store.database.transaction():
            for place in range(begin, begin + 300):
                name = place.to_bytes(16, "big")
                store.devices.add(
                    DeviceRow(
                        name, name * 2, name, bytes(32), 0, name[:8], NOW, 1, name=f"n{place}"
                    )
                )
            seen = {place.to_bytes(16, "big"): NOW for place in range(begin, begin + 300)}
            store.devices.note_seen(seen)
        with Fleet.open(home.folder) as fleet:
            read[0] = 0
            assert len(fleet.find_devices("n", most=100).devices) == 100
            fleet.device((7).to_bytes(16, "big").hex())
            costs.append(read[0])
    assert costs[0] == costs[1]
    store.database.close()
