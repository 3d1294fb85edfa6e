from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.recommendation.split import hold_out_validation
from benchmarks.scatter.execute import execute
from benchmarks.scatter.experiment import Experiment
from benchmarks.scatter.measured_channel import MeasuredChannel
from benchmarks.scatter.outcome import Outcome, OutcomeStore, Point
from benchmarks.scatter.presets import BASELINE, CLASSES, ROWS, preset
from benchmarks.scatter.statistics import paired_difference, spread
from benchmarks.scatter.table import by_class_table, quality_table
from device_sdk.wire.exchange import Broadcast, Update
from tests.device_sdk.learners.reference_step import ReferenceStep


def outcome(hit_ratio: float) -> Outcome:
    return Outcome((Point(1, hit_ratio, 0.3, 0.1, 0.05),), {"8": hit_ratio, "64": 0.5}, 10, 900, 1)


def test_interval_is_students() -> None:
    found = paired_difference([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.half_width == pytest.approx(4.303 * np.std([1, 2, 4], ddof=1) / math.sqrt(3))
    assert math.isnan(spread([1.0]).deviation)
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 2.0])


def test_differences_pair_the_seeds_that_both_have() -> None:
    table = quality_table(
        {
            BASELINE: {0: outcome(0.60), 1: outcome(0.70), 2: outcome(0.9)},
            "unequal": {0: outcome(0.59), 1: outcome(0.69)},
        }
    )
    assert "-0.0100 [-0.0100, -0.0100] (-1.5 %)" in table
    assert "0.7333 ± 0.1528" in table
    assert "| 0.640" in by_class_table({"unequal": {0: outcome(0.59), 1: outcome(0.69)}})


def test_outcomes_are_kept_by_their_settings(tmp_path: Path) -> None:
    store = OutcomeStore(tmp_path / "made")
    one, other = preset("ml-100k", "test", 0), preset("ml-100k", "test", 1)
    assert store.load(one) is None
    store.save(one, outcome(0.6))
    assert store.load(one) == outcome(0.6)
    assert store.load(other) is None


def test_rows_differ_from_the_preset_as_they_say() -> None:
    base = preset("ml-1m", "validation", 3)
    changed = {row.name: row.change(base) for row in ROWS}
    assert changed[BASELINE] == base
    assert len({one.key for one in changed.values()}) == len(ROWS)
    assert changed["unequal"].classes == CLASSES
    assert changed["unequal, patent"].settings.training.scores == "columns"
    assert changed["unequal, patent"].settings.aggregator == "mean"
    assert changed["all at smallest k"].width == min(CLASSES)
    with pytest.raises(ValueError, match="no preset"):
        preset("netflix", "test", 0)


@pytest.mark.parametrize("codec", ["direct", "fp32", "int8"])
def test_a_run_learns_and_repeats(codec: str) -> None:
    # Two tastes: users like one half of the items or the other.
    rng = np.random.default_rng(0)
    train = [20 * (user % 2) + rng.permutation(20)[:12] for user in range(40)]
    split = hold_out_validation(train, 40, rng, latest=False, negatives=20)
    base = preset("ml-100k", "validation", 0)
    experiment = Experiment(
        "ml-100k",
        "validation",
        0,
        width=8,
        classes=(2, 8),
        epochs=30,
        cohort=10,
        every=15,
        codec=codec,  # type: ignore[arg-type]
        settings=base.settings,
        pool=base.pool,
    )
    lines: list[str] = []
    found = execute(experiment, split, ReferenceStep(), lines.append)
    assert [point.epoch for point in found.curve] == [15, 30]
    assert len(lines) == 30
    # About half of the 20 negatives are of the other taste: chance gives 10 in 21.
    assert found.last.hit_ratio > 0.8
    assert set(found.by_class) == {"2", "8"}
    assert (found.update_bytes > 0) == (codec != "direct")
    again = execute(experiment, split, ReferenceStep(), lines.append)
    assert again.curve == found.curve


def test_the_channel_measures_sealed_sizes() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((100, 16)).astype(np.float32)
    update = Update(1, {"columns": np.arange(16), "rows": np.arange(0, 300, 3), "values": values})
    sizes = {}
    for codec in ("fp32", "fp16", "int8"):
        channel = MeasuredChannel(codec, rng)  # type: ignore[arg-type]
        channel.down(Broadcast(1, 0, {"items": np.zeros((400, 64), dtype=np.float32)}))
        received = channel.up(update).tensors
        assert received["rows"].tolist() == list(range(0, 300, 3))
        np.testing.assert_allclose(received["values"], values, atol=0.05)
        assert channel.mean_rows == 100
        sizes[codec] = channel.mean_bytes
    assert 6400 < sizes["fp32"] < 7400
    assert 3200 < sizes["fp16"] < 3900
    assert 1900 < sizes["int8"] < 2300
