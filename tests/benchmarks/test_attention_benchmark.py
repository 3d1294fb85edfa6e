from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.attention.__main__ import main
from benchmarks.attention.execute import LocalMethod, falling
from benchmarks.attention.experiment import Experiment, Local, Outcome, Point, Scores
from benchmarks.attention.rows import BEST, KINDS, OBSERVED, ROWS, STAGES, TABLES
from benchmarks.attention.table import joining_table, known_table, main_table, validation_table
from benchmarks.channels import HalfChannel
from benchmarks.harness import StoredRuns
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update


def outcome(accuracy: float, **changes: object) -> Outcome:
    curve = [Point(4, 0.5, 0.9, 0.4, 10.0), Point(8, 0.8, accuracy, accuracy - 0.1, 20.0)]
    base = Outcome(curve, {OBSERVED: accuracy}, 1000.0, 500.0, 0.1, [Scores(5, [[1.0]], [0.5])])
    return replace(base, **changes)  # type: ignore[arg-type]


def test_validation_picks_the_round() -> None:
    assert outcome(0.7).best.round_id == 8
    assert outcome(0.7).seconds_to(0.8) == 10.0
    assert outcome(0.7).seconds_to(0.95) is None


def test_outcomes_are_kept_under_their_settings(tmp_path: Path) -> None:
    store = StoredRuns(tmp_path / "results", "attention", Outcome)
    experiment = Experiment("air", 0, 2, Local())
    assert store.load(experiment) is None
    store.save(experiment, outcome(0.7))
    assert store.load(experiment) == outcome(0.7)
    assert store.load(replace(experiment, seed=1)) is None
    assert store.load(replace(experiment, method=Local(steps=3))) is None


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
    method = falling(LocalMethod(Local(learning_rate=0.2)), 0.5)
    assert method.open_round(1).settings["learning_rate"] == 0.2
    method.close_round()
    assert method.open_round(3).settings["learning_rate"] == pytest.approx(0.05)


def test_experiments_that_train_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="needs rounds"):
        Experiment("air", 0, 0, Local())


def test_the_command_line_teaches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert all(table in told for table in TABLES)
    assert "examples:" in told
    assert main(["--rows", "nobody", "--results", str(tmp_path)]) == 2
    assert "FedAMP" in capsys.readouterr().err
    assert main(["--table-only", "--results", str(tmp_path)]) == 0
