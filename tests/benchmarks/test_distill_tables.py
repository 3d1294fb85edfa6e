from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.distill.__main__ import cost_table, device_table, main
from benchmarks.distill.experiment import AFD, BASELINE, GLOBAL, ROWS, Outcome, Point
from benchmarks.harness import StoredRuns
from benchmarks.recommendation.click_metrics import ClickQuality


def outcome(auc: float) -> Outcome:
    at_a = ClickQuality(accuracy=0.61, auc=auc, ndcg=0.81, mae=0.41, loss=0.5)
    at_b = ClickQuality(accuracy=0.62, auc=auc, ndcg=0.82, mae=0.42, loss=0.5)
    point = Point(1, 0.6, 10.0, {"A": at_a, "B": at_b, GLOBAL: at_a})
    return Outcome((point,), up_bytes=100, down_bytes=1000, parameters=50)


def cells(table: str) -> list[list[str]]:
    """The heading and the lines of a table, each as its cells."""
    heading, _, *lines = table.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (heading, *lines)]


def test_every_measure_is_shown_by_device() -> None:
    printed = device_table({AFD: {0: outcome(0.76), 1: outcome(0.78)}, BASELINE: {}})
    # The paper's figures by device are of MAE alone.
    assert [cells(table) for table in printed.split("\n\n")] == [
        [
            ["", "MAE A", "MAE B", "AUC A", "AUC B"],
            [AFD, "0.410 (0.15)", "0.420 (0.23)", "0.770", "0.770"],
        ],
        [
            ["", "ACC A", "ACC B", "NDCG@5 A", "NDCG@5 B"],
            [AFD, "0.610", "0.620", "0.810", "0.820"],
        ],
    ]


def test_rows_that_exchange_nothing_have_no_bytes() -> None:
    heading, *lines = cells(cost_table({row.name: {0: outcome(0.7)} for row in ROWS}))
    up, down = heading.index("bytes up"), heading.index("bytes down")
    assert {(line[up], line[down]) for line in lines} == {("100", "1,000"), ("", "")}
    assert {line[0] for line in lines if not line[up]} == {
        "local only",
        "FD, falling rate, alone",
        "AFD, falling rate, alone",
        "pooled",
    }


def test_stored_runs_are_printed_with_every_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = [row for row in ROWS if row.name == BASELINE]
    StoredRuns(tmp_path, "distill", Outcome).save(row.make(0), outcome(0.7))
    assert main(["--table-only", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(f"{measure} B" in printed for measure in ("MAE", "AUC", "ACC", "NDCG@5"))
