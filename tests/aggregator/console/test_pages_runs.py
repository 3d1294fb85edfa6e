"""Runs that were really played show in the console, damaged records beside them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from aggregator.cli import main
from aggregator.console.pages.page import PageQuery
from aggregator.console.pages.runs import RUNS, RunsView
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.operate.fleet import Fleet
from tests.fakes.consoles import InProcess, add_users
from tests.fakes.homes import make_home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> AggregatorHome:
    """With two runs, a record that is damaged and one that lies elsewhere."""
    made = make_home(tmp_path_factory.mktemp("played"), "mqtt://127.0.0.1:1")
    add_users(made)
    before = Path.cwd()
    os.chdir(made.folder)
    try:
        assert main(["simulate", "--example", "films"]) == 0
        command = ["simulate", "films/task.toml", "--data", "films/data.py:devices"]
        command += ["--devices", "20", "--rounds", "2", "--seeds", "2"]
        runs = ["--run", "base", "--run", "narrow", "scatter.columns=8", "dropout=0.25"]
        assert main([*command, *runs]) == 0
    finally:
        os.chdir(before)
    folder = made.folder / "runs"
    (folder / "broken.json").write_text("{")
    (made.folder / "outside.json").write_bytes((folder / "base.json").read_bytes())
    return made


@pytest.fixture
def fleet(home: AggregatorHome) -> Iterator[Fleet]:
    with Fleet.open(home.folder) as found:
        yield found


def _query(**asked: str) -> PageQuery:
    assert set(asked) <= RUNS.takes
    return PageQuery(tuple(sorted(asked.items())))


def _view(fleet: Fleet, **asked: str) -> RunsView:
    return RUNS.read(fleet, _query(**asked))


def test_runs_are_listed_the_damaged_one_with_its_fault(fleet: Fleet) -> None:
    found = {each.name: each for each in _view(fleet).runs}
    assert set(found) == {"base", "narrow", "broken"}
    assert (found["base"].state, found["base"].devices, found["base"].rounds) == (
        *("finished", "20"),
        "2",
    )
    assert "±" in found["base"].last and found["base"].changed == "-"
    assert found["narrow"].changed == "scatter.columns=8, dropout=0.25"
    assert "is no record that can be read" in found["broken"].fault


def test_one_is_shown_with_all_its_settings_two_with_those_that_differ(fleet: Fleet) -> None:
    one = _view(fleet, run="base")
    assert one.chosen == ("base",) and "scatter.columns" in {name for name, _ in one.settings}
    assert [name for name, _ in one.picture.legend] == ["base"]
    two = _view(fleet, run="base", beside="narrow")
    assert {name: said for name, *said in two.settings} == {
        "scatter.columns": ["32", "8"],
        "dropout": ["0.0", "0.25"],
    }
    assert [name for name, _ in two.picture.legend] == ["base", "narrow"]
    assert two.metric == two.metrics[0] and {len(row) for row in two.figures} == {3}
    other = _view(fleet, run="base", metric=two.metrics[1])
    assert other.picture.title == f"{two.metrics[1]} by rounds played"
    assert _view(fleet, run="base", beside="base").chosen == ("base",)


@pytest.mark.parametrize("name", ["none", "../outside", "outside", "/etc/passwd", "base.json"])
def test_nothing_but_what_is_listed_can_be_named(fleet: Fleet, name: str) -> None:
    view = _view(fleet, run=name)
    assert view.fault.startswith(f"there is no run {name!r}") and not view.chosen and view.runs
    assert "is no record that can be read" in _view(fleet, run="broken").fault


def test_what_runs_offer_to_take_away(fleet: Fleet) -> None:
    made: dict[str, Any] = {each.name: each.make for each in RUNS.files}
    ElementTree.fromstring(made["picture.svg"](fleet, _query(run="base", beside="narrow")))
    text = made["figures.csv"](fleet, _query(run="base", beside="narrow"))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {each["run"] for each in rows} == {"base", "narrow"}
    assert {each["seed"] for each in rows} == {"0", "1"}
    with pytest.raises(AggregatorError, match="no run with figures"):
        made["picture.svg"](fleet, _query())


def test_without_runs_it_says_how_they_come(tmp_path: Path) -> None:
    with Fleet.open(make_home(tmp_path, "mqtt://127.0.0.1:1").folder) as fleet:
        assert _view(fleet).runs == () and "no run" in _view(fleet, run="x").fault


def test_a_browser_sees_them(home: AggregatorHome) -> None:
    console = InProcess(home)
    vic = console.logged_in("vic")
    text = vic.get("/runs?run=base&beside=narrow").text
    assert "scatter.columns" in text and 'href="/runs?run=narrow"' in text and "<svg" in text
    assert vic.get("/runs?run=base").status_code == vic.get("/runs").status_code == 200
    answer = vic.get("/runs/figures.csv?run=base")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/csv")
    console.close()
