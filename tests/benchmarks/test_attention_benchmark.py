from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.attention.__main__ import (
    joining_table,
    main,
    main_caption,
    main_table,
    untouched_table,
    validation_table,
)
from benchmarks.attention.execute import FallingRate
from benchmarks.attention.experiment import (
    BEST,
    OBSERVED,
    ROWS,
    STAGES,
    TABLES,
    Outcome,
    Point,
    Scores,
)
from benchmarks.channels import HalfChannel
from benchmarks.datasets.air import SUBURBS
from benchmarks.datasets.untouched import UNTOUCHED
from benchmarks.datasets.vmnist import VARIANTS
from benchmarks.harness import StoredRuns, default_data_folder
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update


def outcome(accuracy: float, **changes: object) -> Outcome:
    curve = [Point(4, 0.5, 0.9, 0.4, 10.0), Point(8, 0.8, accuracy, accuracy - 0.1, 20.0)]
    base = Outcome(curve, {OBSERVED: accuracy}, 1000.0, 500.0, 0.1, [Scores(5, [[1.0]], [0.5])])
    return replace(base, **changes)  # type: ignore[arg-type]


def test_validation_picks_the_round() -> None:
    assert outcome(0.7).best.round_id == 8
    assert outcome(0.7).seconds_to(0.8) == 10.0
    assert outcome(0.7).seconds_to(0.95) is None


def test_every_row_is_a_run_of_its_own() -> None:
    made = {}
    for row in ROWS:
        assert row.table in TABLES
        made.setdefault(repr(row.make(0)), []).append((row.table, row.name))
        assert row.make(0) != row.make(1)
    shared = [names for names in made.values() if len(names) > 1]
    # The last stage of figure 6 is the table of all stations; n = all is the plain method.
    again = {"joining", "neighbours", "known"}
    assert all({table for table, _ in names} & again for names in shared)
    assert len(STAGES[-1]) == 0


def test_tables_show_means_and_paired_differences() -> None:
    table = main_table(
        {
            BEST: {0: outcome(0.72), 1: outcome(0.74)},
            "FedAvg": {0: outcome(0.70), 1: outcome(0.71)},
            "FedSGD": {},
        }
    )
    assert "73.00 ± 1.41" in table
    assert "+2.50 [-3.85, +8.85]" in table
    assert "FedSGD" not in table
    found = joining_table({"FTL, 1": {0: outcome(0.6)}, "FTL, 4": {0: outcome(0.65)}})
    assert "| FTL " in found
    assert "60.00" in found
    assert "65.00" in found
    assert "80.00" in validation_table({"FTL": {0: outcome(0.6)}})


def test_what_ships_is_compared_fleet_by_fleet() -> None:
    table = untouched_table(
        {
            "a, fine-tuned": {0: outcome(0.70), 1: outcome(0.72)},
            "a, attention": {0: outcome(0.71), 1: outcome(0.75)},
            "b, fine-tuned": {0: outcome(0.9)},
            "b, attention": {0: outcome(0.8)},
            "b, alone": {},
        }
    )
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert [line[:4] for line in lines[2:]] == [
        ["a", "fine-tuned", "71.00 ± 1.41", ""],
        ["a", "attention", "73.00 ± 2.83", "+2.00 [-10.71, +14.71]"],
        ["b", "fine-tuned", "90.00", ""],
        ["b", "attention", "80.00", "-10.00"],
    ]


def test_untouched_fleets_share_no_row_and_keep_their_sizes() -> None:
    root = default_data_folder()
    if not (root / "pacs64").is_dir():
        pytest.skip(f"no data sets in {root}")
    for name in ("relabelled", "pacs"):
        fleet = UNTOUCHED[name](root, np.random.default_rng(0))
        parts = [part for each in fleet for part in (each.train, each.validation, each.test)]
        assert len({part.x.shape for part in parts}) in (2, 3)
        rows = np.concatenate([part.x.reshape(len(part.x), -1) for part in parts])
        assert len(np.unique(rows, axis=0)) > 0.99 * len(rows)
        again = UNTOUCHED[name](root, np.random.default_rng(0))
        np.testing.assert_array_equal(fleet[-1].test.x, again[-1].test.x)


def test_the_channel_rounds_to_half_and_counts() -> None:
    channel = HalfChannel(3)
    exact = np.asarray([1.0, 1 / 3], np.float32)
    down = channel.down(Broadcast(1, 0, {"a": exact}))
    np.testing.assert_array_equal(down.tensors["a"], exact.astype(np.float16).astype(np.float32))
    once = channel.down_bytes
    channel.fetch(0, Attachment({"a": exact}))
    assert channel.down_bytes == once + once // 3
    channel.up(Update(1, {"a": exact}))
    assert channel.up_bytes == once // 3


def test_the_rate_falls_for_every_method() -> None:
    channel = FallingRate(3, 0.5)
    rates = [
        channel.down(Broadcast(round_id, 0, {}, {"learning_rate": 0.2})).settings["learning_rate"]
        for round_id in (1, 3)
    ]
    assert rates == [0.2, pytest.approx(0.05)]


EIGHTEEN = [f"{variant}.{number}" for variant in VARIANTS for number in (1, 2, 3)]


def mixed(accuracies: dict[str, float], rounds: tuple[int, ...] = ()) -> Outcome:
    """In round r, device i gives device j the weight r + i + 100 j, scaled to a sum of 1."""
    n = len(accuracies)
    scores = []
    for round_id in rounds:
        raw = round_id + np.arange(n)[:, None] + 100.0 * np.arange(n)
        first = raw / raw.sum(axis=1, keepdims=True)
        scores.append(Scores(round_id, first.tolist(), np.linspace(0, 1, n).tolist()))
    curve = [Point(4, 0.5, 0.7, 0.6, 1.0)]
    return Outcome(curve, accuracies, 1000.0, 500.0, 0.1, scores)


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_stored_runs_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = StoredRuns(tmp_path / "results", "attention", Outcome)
    air = dict.fromkeys((OBSERVED, *sorted(SUBURBS)), 0.7)
    for row in ROWS:
        if row.name == BEST and row.table in ("vmnist", "air"):
            names = dict.fromkeys(EIGHTEEN, 0.7) if row.table == "vmnist" else air
            store.save(row.make(0), mixed(names, (5, 20)))
    told = ["--table-only", "--results", str(tmp_path / "results")]
    pictures = tmp_path / "pictures"
    assert main([*told, "--pictures", str(pictures)]) == 0
    printed = capsys.readouterr().out
    # The run of all stations is the last of those that join.
    names = ["attention-air.png", "attention-vmnist.png", "joining.png"]
    assert sorted(path.name for path in pictures.iterdir()) == names
    assert all(is_picture(path) for path in pictures.iterdir())
    assert f"attention-vmnist.png ({BEST}, seed 0)" in printed
    assert main_caption(4) in printed
    assert "one every 4 rounds, not interpolated" in printed

    nothing = ["--table-only", "--results", str(tmp_path / "empty")]
    assert main([*nothing, "--pictures", str(tmp_path / "none")]) == 0
    said = capsys.readouterr().err
    assert all(f"no picture of {name}" in said for name in ("vmnist", "air", "joining"))
    assert not (tmp_path / "none").exists()
