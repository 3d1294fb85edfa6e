"""Fleets that train parts of one model: a run, and how a row's setting is picked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import Artifacts
from benchmarks.submodels.__main__ import SubmodelSuite
from benchmarks.submodels.experiment import ROWS, Experiment, Outcome, Setting, Tuned
from benchmarks.submodels.fleet import execute
from benchmarks.submodels.tasks import auc
from tests.benchmarks.made_up_movielens import made_up_movielens

TINY = Experiment(0, "clicks", 1.0, "unequal", "widths", 0.5, 0.03, 2, 50, 12, 2, 8)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    return Artifacts(tmp_path_factory.mktemp("artifacts"))


def test_each_class_is_judged_by_its_part_and_sends_no_more(
    tmp_path: Path, shelf: Artifacts
) -> None:
    root, told = made_up_movielens(tmp_path), list[str]()
    found = execute(TINY, root, shelf, told.append)
    assert found == replace(
        execute(TINY, root, shelf, told.append), milliseconds=found.milliseconds
    )
    assert len({*found.test}) == 4 and found.failed == 0
    assert [*found.up_bytes] == sorted({*found.up_bytes}) and found.up_bytes[0] > 0
    alone = execute(replace(TINY, fleet="alone", server=0.0), root, shelf, told.append)
    assert alone.up_bytes == (0.0,) * 4 and all(0 < each < 1 for each in alone.test)


class Made(SubmodelSuite):
    """Better the nearer the rate is to 0.2, on validation samples; on the others, the farther."""

    def execute(self, run: Experiment, *_: object) -> Outcome:
        off = abs(run.learning_rate - 0.2) + run.seed / 1000
        return Outcome(10, (1 - off,) * 4, (off,) * 4, (1e3,) * 4, (1e3,) * 4, (1.0,) * 4)


def test_validation_of_the_first_seed_picks_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--results", str(tmp_path), "--table", "air", "--rows", "all full;low rank"]
    suite = Made()
    suite.rows = tuple(replace(row, settings=(Setting(0.1), Setting(0.2))) for row in ROWS)
    assert suite.main([*given, "--table-only"]) == 0 and "low rank" not in capsys.readouterr().out
    picture = tmp_path / "quality.png"
    assert suite.main([*given, "--seeds", "3", "--picture", str(picture)]) == 0
    (line, *_) = (each for each in capsys.readouterr().out.splitlines() if "low rank" in each[:12])
    assert [cell.strip() for cell in line.split("|")[2:5]] == [
        "3", "0.0010 ± 0.0010", "+0.0 [+0.0, +0.0]"
    ]  # fmt: skip
    assert "| 0.2 " in line and picture.stat().st_size > 1000
    assert len((tmp_path / "submodels.jsonl").read_text().splitlines()) == 2 * (3 + 1)


def test_every_row_has_a_budget_of_six_settings_at_most() -> None:
    assert all(isinstance(row, Tuned) and 1 <= len(row.settings) <= 6 for row in ROWS)


def test_auc_is_the_share_of_pairs_in_order() -> None:
    label, scores = np.array([1, 0, 1, 0]), np.array([0.9, 0.5, 0.5, 0.1], np.float32)
    assert auc(label, scores) == 0.875
    assert np.isnan(auc(label[:1], scores[:1]))
