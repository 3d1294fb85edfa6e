from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.attention.__main__ import (
    device_groups,
    draw_joining,
    draw_listening,
    joining_accuracies,
    joining_table,
    known_table,
    main,
    main_caption,
    main_table,
    moment_of,
    validation_table,
)
from benchmarks.attention.execute import FallingRate
from benchmarks.attention.experiment import (
    BEST,
    KINDS,
    OBSERVED,
    ROWS,
    STAGES,
    TABLES,
    Experiment,
    Local,
    Outcome,
    Point,
    Scores,
)
from benchmarks.channels import HalfChannel
from benchmarks.datasets.air import SUBURBS, load_air
from benchmarks.datasets.vmnist import VARIANTS, load_vmnist
from benchmarks.harness import StoredRuns
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from examples.attention_picture import weights_between
from tests.benchmarks.test_air_data import write_station
from tests.benchmarks.test_vmnist_data import write_set


def outcome(accuracy: float, **changes: object) -> Outcome:
    curve = [Point(4, 0.5, 0.9, 0.4, 10.0), Point(8, 0.8, accuracy, accuracy - 0.1, 20.0)]
    base = Outcome(curve, {OBSERVED: accuracy}, 1000.0, 500.0, 0.1, [Scores(5, [[1.0]], [0.5])])
    return replace(base, **changes)  # type: ignore[arg-type]


def test_validation_picks_the_round() -> None:
    assert outcome(0.7).best.round_id == 8
    assert outcome(0.7).seconds_to(0.8) == 10.0
    assert outcome(0.7).seconds_to(0.95) is None


def test_every_row_is_a_run_of_its_own() -> None:
    keys = {}
    for row in ROWS:
        assert row.table in TABLES
        keys.setdefault(row.make(0).key, []).append((row.table, row.name))
        assert row.make(0).key != row.make(1).key
    shared = [names for names in keys.values() if len(names) > 1]
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


def test_devices_that_were_told_apart_stand_in_one_line() -> None:
    by_kind = {
        kind: dict.fromkeys(devices, 0.6 + 0.1 * place)
        for place, (kind, devices) in enumerate(KINDS.items())
    }
    table = known_table(
        {
            **{f"FTL, {kind}": {0: outcome(0.5, by_device=by_kind[kind])} for kind in KINDS},
            "FTL, all": {0: outcome(0.5, by_device=by_kind["digits"] | by_kind["clothes"])},
            f"{BEST}, all": {},
        }
    )
    apart, together = table.splitlines()[2:]
    told = [cell.strip() for cell in apart.split("|")[1:4]]
    assert told == ["FTL, told apart", "60.00", "70.00"]
    assert [cell.strip() for cell in together.split("|")[1:4]] == ["FTL", "60.00", "70.00"]


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


def test_experiments_that_train_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="needs rounds"):
        Experiment("air", 0, 0, Local())


def test_the_command_line_teaches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert all(table in told for table in TABLES)
    assert "examples:" in told
    assert main(["--table-only", "--results", str(tmp_path)]) == 0


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
    run = mixed(dict.fromkeys(EIGHTEEN, 0.5), (5,))
    groups = device_groups("vmnist", sorted(run.by_device))
    first, second = weights_between(
        moment_of(run.scores[0], groups), {name: name for name in groups}
    )
    np.testing.assert_allclose(first, run.scores[0].first, rtol=1e-6)
    np.testing.assert_allclose(second, run.scores[0].second, atol=1e-6)
    assert first[0].argmax() == EIGHTEEN.index("fashion.3")


def test_a_run_without_scores_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no scores"):
        draw_listening(tmp_path / "p.png", "air", mixed({"Dongsi": 0.7}))


def test_joining_is_told_by_method_and_number_of_stations(tmp_path: Path) -> None:
    made_up = {
        "FTL, 12": {0: mixed({OBSERVED: 0.75})},
        "FTL, 1": {0: mixed({OBSERVED: 0.5}), 1: mixed({OBSERVED: 0.75})},
        f"{BEST}, 4": {0: mixed({OBSERVED: 0.625})},
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


def test_validation_alone_has_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--validation", "--pictures", "anywhere"])
    assert "not allowed with" in capsys.readouterr().err
