from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.attention.__main__ import (
    device_groups,
    draw_joining,
    draw_listening,
    joining_accuracies,
    joining_table,
    main,
    main_caption,
    moment_of,
)
from benchmarks.attention.experiment import BEST, OBSERVED, ROWS, Outcome, Point, Scores
from benchmarks.datasets.air import SUBURBS, load_air
from benchmarks.datasets.vmnist import VARIANTS, load_vmnist
from benchmarks.harness import StoredRuns
from examples.attention_picture import weights_between
from tests.benchmarks.test_air_data import write_station
from tests.benchmarks.test_vmnist_data import write_set

EIGHTEEN = [f"{variant}.{number}" for variant in VARIANTS for number in (1, 2, 3)]


def outcome(accuracies: dict[str, float], rounds: tuple[int, ...] = ()) -> Outcome:
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


def test_groups_come_in_the_fleets_order(tmp_path: Path) -> None:
    write_set(tmp_path / "mnist", 15 * 3, 15, 1)
    write_set(tmp_path / "fashion-mnist", 3 * 3, 3, 2)
    fleet = load_vmnist(tmp_path, np.random.default_rng(0), train=2, validation=1, test=1)
    groups = device_groups("vmnist", sorted(device.name for device in fleet))
    assert list(groups.items()) == [(device.name, device.variant) for device in fleet]

    for name in ("Shunyi", "Dongsi", "Changping"):
        write_station(tmp_path, name, {})
    stations = [station.name for station in load_air(tmp_path)]
    found = device_groups("air", stations[::-1])
    assert list(found.items()) == [
        ("Changping", "suburbs"),
        ("Dongsi", "city"),
        ("Shunyi", "suburbs"),
    ]
    assert list(found) == stations


def test_stored_weights_reach_the_picture_unchanged() -> None:
    run = outcome(dict.fromkeys(EIGHTEEN, 0.5), (5,))
    groups = device_groups("vmnist", sorted(run.by_device))
    first, second = weights_between(
        moment_of(run.scores[0], groups), {name: name for name in groups}
    )
    np.testing.assert_allclose(first, run.scores[0].first, rtol=1e-6)
    np.testing.assert_allclose(second, run.scores[0].second, atol=1e-6)
    assert first[0].argmax() == EIGHTEEN.index("fashion.3")


def test_a_run_without_scores_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no scores"):
        draw_listening(tmp_path / "p.png", "air", outcome({"Dongsi": 0.7}))


def test_joining_is_told_by_method_and_number_of_stations(tmp_path: Path) -> None:
    made_up = {
        "FTL, 12": {0: outcome({OBSERVED: 0.75})},
        "FTL, 1": {0: outcome({OBSERVED: 0.5}), 1: outcome({OBSERVED: 0.75})},
        f"{BEST}, 4": {0: outcome({OBSERVED: 0.625})},
        "FedAvg, 1": {},
    }
    assert joining_accuracies(made_up) == {
        "FTL": {12: [75.0], 1: [50.0, 75.0]},
        BEST: {4: [62.5]},
    }
    heading, *_ = joining_table(made_up).splitlines()
    assert [cell.strip() for cell in heading.split("|")[2:5]] == ["1", "4", "12"]
    assert is_picture(draw_joining(tmp_path / "deep" / "joining.png", made_up))


def test_stored_runs_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = StoredRuns(tmp_path / "results", "attention", Outcome)
    air = dict.fromkeys((OBSERVED, *sorted(SUBURBS)), 0.7)
    for row in ROWS:
        if row.name == BEST and row.table in ("vmnist", "air"):
            names = dict.fromkeys(EIGHTEEN, 0.7) if row.table == "vmnist" else air
            store.save(row.make(0), outcome(names, (5, 20)))
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


def test_validation_alone_has_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--validation", "--pictures", "anywhere"])
    assert "not allowed with" in capsys.readouterr().err
