"""Benchmarks with stored runs: which rows and seeds are asked for, and what is run again."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import RESULTS, Row, StoredRuns, Suite, is_of, named


@dataclass(frozen=True)
class Run:
    seed: int


@dataclass(frozen=True)
class Found:
    score: float


@dataclass(frozen=True)
class Scored:
    points: tuple[Found, ...]
    by_name: dict[str, Found]
    lists: list[list[float]]
    missing: float | None


class Small(Suite[Run, Found]):
    name = "small"
    description = "what --help says"
    outcome = Found
    tables: Mapping[str, str] = {"few": "a few {results}", "many": "many"}
    rows = (Row("a", "", Run, "few"), Row("b", "", Run, "few"), Row("a", "", Run, "many"))
    seeds: Mapping[str, int] = {"few": 2, "many": 1}

    def execute(self, run: Run, options: argparse.Namespace, progress: Any) -> Found:
        return Found(run.seed / 10)

    def shown(self, table: str, outcomes: Any, options: argparse.Namespace) -> Iterator[str]:
        yield repr(outcomes)


def test_a_run_is_made_once_and_only_where_it_may_be(tmp_path: Path) -> None:
    stored = StoredRuns[Run, Found](tmp_path / "made" / "later", "small", Found)
    assert stored.found_or_made(Run(1), None) is None
    assert stored.found_or_made(Run(1), lambda: Found(0.5)) == Found(0.5)
    assert stored.found_or_made(Run(1), lambda: pytest.fail("was run again")) == Found(0.5)
    assert stored.found_or_made(Run(1), None) == Found(0.5)
    assert stored.found_or_made(Run(2), None) is None


def test_a_line_from_before_a_setting_was_added_is_of_its_default(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Inner:
        rate: float = 0.5
        later: str = "usual"

    @dataclass(frozen=True)
    class Wider:
        seed: int
        inner: Inner = Inner()
        lists: tuple[int, ...] = ()

    line = {"outcome": {"score": 0.5}, "run": {"seed": 1, "inner": {"rate": 2}}}
    (tmp_path / "small.jsonl").write_text(json.dumps(line) + "\n")
    stored = StoredRuns[Wider, Found](tmp_path, "small", Found)
    assert stored.load(Wider(1, Inner(2.0))) == Found(0.5)
    others = [Wider(1), Wider(2, Inner(2.0)), Wider(1, Inner(2.0, "odd")), Wider(1, lists=(3,))]
    assert [stored.load(each) for each in others] == [None] * 4


def test_lines_stand_in_the_order_of_what_was_run(tmp_path: Path) -> None:
    stored = [StoredRuns[Run, Found](tmp_path / name, "small", Found) for name in ("a", "b")]
    for one, seeds in zip(stored, ((3, 1, 2), (2, 3, 1)), strict=True):
        for seed in seeds:
            one.save(Run(seed), Found(seed / 10))
    one, other = (each.file.read_bytes() for each in stored)
    assert one == other and len(one.splitlines()) == 3
    assert one.startswith(b'{"outcome": {"score": 0.1}, "run": {"seed": 1}}\n')
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["small.jsonl"]


def test_two_suites_that_run_at_once_keep_what_the_other_found(tmp_path: Path) -> None:
    one, other = (StoredRuns[Run, Found](tmp_path, "small", Found) for _ in range(2))
    one.save(Run(1), Found(0.1))
    assert other.load(Run(1)) == Found(0.1)
    other.save(Run(2), Found(0.2))
    one.save(Run(3), Found(0.3))
    assert [other.load(Run(seed)) for seed in (1, 2, 3)] == [Found(0.1), Found(0.2), Found(0.3)]


def test_a_run_that_is_stopped_leaves_what_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = StoredRuns[Run, Found](tmp_path, "small", Found)
    stored.save(Run(1), Found(0.1))

    def stopped(_: Path, text: str, encoding: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        stored.save(Run(2), Found(0.2))
    monkeypatch.undo()
    assert stored.load(Run(1)) == Found(0.1) and stored.load(Run(2)) is None
    stored.save(Run(2), Found(0.2))
    assert stored.load(Run(2)) == Found(0.2)


def test_outcomes_come_back_as_the_types_that_they_were(tmp_path: Path) -> None:
    kept = Scored((Found(0.1), Found(0.2)), {"one": Found(0.3)}, [[0.5], []], None)
    StoredRuns[Run, Scored](tmp_path, "scored", Scored).save(Run(1), kept)
    assert StoredRuns[Run, Scored](tmp_path, "scored", Scored).load(Run(1)) == kept


def test_names_keep_the_order_of_the_table() -> None:
    known = ["all at K", "unequal", "capped"]
    assert named(None, known) == known
    assert named("capped; all at K", known) == ["all at K", "capped"]


def test_an_unknown_name_ends_the_program_and_lists_the_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        named("a;x", ["a", "b", "a"], "--options")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "--options: unknown name 'x'; known are: a; b\n"


def test_seeds_are_those_named_else_the_suites_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*asked: str) -> str:
        assert Small().main([*asked, "--results", str(tmp_path)]) == 0
        return capsys.readouterr().out

    few, many = {0: Found(0.0), 1: Found(0.1)}, {0: Found(0.0)}
    assert printed() == (
        f"\na few {tmp_path}\n\n{ {'a': few, 'b': few} }\n\nmany\n\n{ {'a': many} }\n"
    )
    late = {seed: Found(seed / 10) for seed in (4, 5, 6)}
    asked = ("--seeds", "3", "--first-seed", "4", "--table", "few", "--rows", "b")
    assert str({"b": late}) in printed(*asked)
    assert printed("--seeds", "9", "--table-only", "--table", "many") == (
        f"\nmany\n\n{ {'a': {seed: Found(seed / 10) for seed in (0, 1, 4, 5, 6)}} }\n"
    )


# By suite, the command lines that together ask for everything stored.
_ASKED = {
    "attention": ["--seeds 3"],
    "distill": ["--seeds 3"],
    "mutual": ["--seeds 3"],
    "peers": ["--flower-whole"],
    "privacy": ["--seeds 1"],
    "recommendation": [""],
    "robust": [
        "--method fedavg --seeds 3",
        "--method logits --seeds 3",
        "--epochs 40 --method scatter --seeds 3",
        "--one-device --split validation --method fedavg",
        "--one-device --epochs 40 --split validation --method scatter --seeds 2",
        "--one-device --epochs 10 --split validation --method scatter --seeds 2",
    ],
    "scatter": ["--seeds 10"],
    "submodels": ["--seeds 5"],
}


@pytest.mark.parametrize("suite", _ASKED)
def test_stored_runs_are_asked_for(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    load = StoredRuns.load

    def noted(stored: StoredRuns[Any, Any], run: Any) -> Any:
        asked[json.dumps(asdict(run), sort_keys=True)] = run
        # These ask for what depends on what they found.
        return load(stored, run) if suite in ("mutual", "recommendation", "submodels") else None

    monkeypatch.setattr(StoredRuns, "load", noted)
    main = importlib.import_module(f"benchmarks.{suite}.__main__").main
    for arguments in _ASKED[suite]:
        assert main(["--table-only", *arguments.split()]) == 0
    lines = map(json.loads, (RESULTS / f"{suite}.jsonl").read_text().splitlines())
    runs = [line["run"] for line in lines]
    lost = [run for run in runs if json.dumps(run, sort_keys=True) not in asked]
    lost = [run for run in lost if not any(is_of(run, each) for each in asked.values())]
    assert not lost, f"{len(lost)}, of which one is {lost[0]}"


@pytest.mark.parametrize("suite", _ASKED)
def test_the_command_line_teaches(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{suite}.__main__").main(["--help"])
    assert stopped.value.code == 0 and "--table-only" in capsys.readouterr().out
