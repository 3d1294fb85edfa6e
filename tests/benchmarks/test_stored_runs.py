"""Benchmarks with stored runs: which rows and seeds are asked for, and what is run again."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command_line import add_rows, add_run_options, named, seeds_of
from benchmarks.outcomes import OutcomeFolder


@dataclass(frozen=True)
class Run:
    seed: int

    @property
    def key(self) -> str:
        return str(self.seed)


@dataclass(frozen=True)
class Found:
    score: float


class Folder(OutcomeFolder[Run, Found]):
    def prefix(self, run: Run) -> str:
        return "small"

    def decoded(self, fields: dict[str, Any]) -> Found:
        return Found(**fields)


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_rows(parser)
    add_run_options(parser, Path("results"), seeds=None, said="10 and 3")
    return parser.parse_args(given)


def test_a_run_is_made_once_and_only_where_it_may_be(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "made" / "later")
    assert folder.found_or_made(Run(1), None) is None
    assert folder.found_or_made(Run(1), lambda: Found(0.5)) == Found(0.5)
    assert folder.found_or_made(Run(1), lambda: pytest.fail("was run again")) == Found(0.5)
    assert folder.found_or_made(Run(1), None) == Found(0.5)
    assert folder.found_or_made(Run(2), None) is None


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


def test_seeds_are_those_named_else_the_benchmarks_own() -> None:
    assert list(seeds_of(options(), otherwise=2)) == [0, 1]
    assert list(seeds_of(options("--seeds", "3", "--first-seed", "4"), otherwise=2)) == [4, 5, 6]
