"""A function of the operator's gives the data: whatever else it gives is refused in words."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from aggregator.simulate.data import (
    DataError,
    TableEntries,
    arrays_of,
    entries_of,
    find_function,
    interactions_of,
    require_known,
)
from device_sdk.local_data import LocalData
from device_sdk.tables.text import Reading

CATALOGUE = {f"i{row}": row for row in range(5)}
CODE = """
import numpy as np
from device_sdk import LocalData

number = 3

def listed(devices, rng):
    return [[0]] * devices

def made(devices, rng):
    yield from ([0] for _ in iter(int, 1))

def short(devices, rng):
    return iter([[0]])

def nothing(devices, rng):
    pass

def one(devices, rng):
    return LocalData({})

def alone(devices):
    return []

def failing(devices, rng):
    raise ZeroDivisionError("oh")

def mistyped(devices, rng):
    return len(3)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("name", ["listed", "made"])
def test_a_sequence_or_an_iterator_will_do(file: Path, name: str) -> None:
    assert list(entries_of(f"{file}:{name}", 2, np.random.default_rng(0)))[:2] == [[0], [0]]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent", "its functions are listed, made, short"),
        ("number", "is of type int; expected a function"),
        ("short", "of 1 devices; 2 were asked for"),
        ("nothing", "returned is of type NoneType; expected a sequence"),
        ("one", "returned is of type LocalData; expected a sequence"),
        ("alone", "must take two arguments"),
        ("failing", "failed: ZeroDivisionError: oh"),
        ("mistyped", "failed: TypeError: object of type 'int'"),
    ],
)
def test_what_a_function_gives_otherwise_is_named(file: Path, name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        entries_of(f"{file}:{name}", 2, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("mine", "expected module:function"),
        ("mine:", "expected module:function"),
        (":f", "expected module:function"),
        ("a.b:c d", "expected module:function"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("no_such.py:f", "is no file"),
        ("no_such.py", "is no file"),
    ],
)
def test_a_name_that_leads_nowhere_is_told(said: str, error: str) -> None:
    with pytest.raises(DataError, match=error):
        find_function(said)


def test_a_file_without_a_function_is_answered_with_those_that_it_has(file: Path) -> None:
    with pytest.raises(
        DataError, match=r"mine\.py:FUNCTION; its functions are listed, made, short"
    ):
        find_function(str(file))


def test_a_file_that_does_not_import_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (")
    with pytest.raises(DataError, match="cannot be imported: SyntaxError"):
        find_function(f"{tmp_path / 'broken.py'}:f")


def test_the_latest_of_a_users_items_is_held_back_where_the_task_evaluates() -> None:
    from device_sdk.evaluation.report import EvaluationTerms

    entry = [{"anna": ["i3", "i1", "new", "i1", "i0"], "none": [], "bert": np.array([2])}]
    kept, held, count = interactions_of(entry, 0, CATALOGUE, EvaluationTerms(("hr10",)))
    assert (count.recorded, count.unknown) == (5, 1)
    assert [rows.tolist() for rows in kept] == [[1, 3], [2]]
    assert [(each.user, each.item) for each in held] == [(0, 0)]
    kept, held, _ = interactions_of(entry, 0, CATALOGUE, None)
    assert [rows.tolist() for rows in kept] == [[0, 1, 3], [2]] and held == []


@pytest.mark.parametrize("entry", [5, "i1", [1.5], [["i1"]], None, np.zeros((2, 2)), b"i"])
def test_what_is_no_interactions_is_named(entry: object) -> None:
    with pytest.raises(DataError, match="the data of device 0 holds something of type"):
        interactions_of([entry], 0, CATALOGUE, None)


def test_rows_beyond_the_catalogue_and_ids_of_another_are_refused() -> None:
    with pytest.raises(DataError, match="names row 5; the catalogue has 5 items"):
        interactions_of([[1, 5]], 0, CATALOGUE, None)
    with pytest.raises(DataError, match="names row -1; the catalogue has 5 items"):
        interactions_of([[4, -1]], 0, CATALOGUE, None)
    with pytest.raises(DataError, match="has none of the items of the first 2 devices"):
        require_known([["a"], ["b"]], 2, CATALOGUE)
    with pytest.raises(DataError, match="none of the 20 devices has an item"):
        require_known([[]] * 20, 20, CATALOGUE)
    require_known([*[[]] * 20, ["i1"]], 21, CATALOGUE)
    require_known([["a"], ["i1"]], 2, CATALOGUE)


def test_arrays_come_as_a_device_takes_them() -> None:
    data = LocalData({"x": np.zeros((2, 1))})
    assert arrays_of([data], 0) is data and arrays_of([lambda: data], 0) is data
    for entry, said in (
        ({"x": np.zeros(2)}, "is of type dict"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ):
        with pytest.raises(DataError, match=said):
            arrays_of([entry], 0)


def test_a_file_imports_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_mine.py").write_text("ITEM = 3\n")
    (tmp_path / "mine.py").write_text(
        "import beside_mine\ndef f(devices, rng):\n    return [[beside_mine.ITEM]] * devices\n"
    )
    assert entries_of(f"{tmp_path / 'mine.py'}:f", 1, np.random.default_rng(0)) == [[3]]


def test_a_table_gives_each_of_its_users_a_device(tmp_path: Path) -> None:
    path = tmp_path / "views.dat"
    path.write_text("anna::i3::5::978300760\nbert::i1::4::978300761\nanna::i2::4::978300759\n")
    rng = np.random.default_rng(0)
    found = entries_of(str(path), 2, rng)
    assert isinstance(found, TableEntries) and found == [["i2", "i3"], ["i1"]]
    assert "time = column 4" in found.understood[0]
    swapped = Reading({"user": "2", "item": "1"})
    other = entries_of(str(path), 3, rng, swapped)
    assert other == [["anna"], ["bert"], ["anna"]]
    with pytest.raises(DataError, match=r"knows the table's users: --columns .* swaps them"):
        require_known(other, 3, CATALOGUE)
    with pytest.raises(DataError, match="--columns and its like are for a table"):
        entries_of("some:function", 3, rng, swapped)
    with pytest.raises(DataError, match=r"has 2 users.*--devices 2"):
        entries_of(str(path), 3, rng)
    path.write_text("nothing\n")
    with pytest.raises(DataError, match=r"--data: .*views\.dat: no columns found"):
        entries_of(str(path), 3, rng)
