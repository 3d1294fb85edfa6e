from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from aggregator.intervals import paired_difference, spread
from aggregator.methods.scatter import ScatterSettings
from benchmarks.channels import ScatterChannel
from benchmarks.recommendation.central import Line
from benchmarks.recommendation.central import Outcome as CentralOutcome
from benchmarks.recommendation.split import LeaveOneOut, hold_out_validation
from benchmarks.scatter.__main__ import by_class_table, quality_table
from benchmarks.scatter.experiment import (
    BASELINE,
    CLASSES,
    ROWS,
    Experiment,
    Outcome,
    Point,
    execute,
    least_squares,
    preset,
    published_bytes,
)
from device_sdk.methods.scatter.contract import LossName
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.seal.session import (
    FRAGMENT_BYTES,
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    TAG_BYTES,
    padded_length,
)
from tests.fakes.reference_step import ReferenceStep


def outcome(ndcg: float, *on_the_way: float) -> Outcome:
    found = (*on_the_way, ndcg)
    curve = tuple(Point(at + 1, 0.2, one, 0.6, 0.3) for at, one in enumerate(found))
    return Outcome(curve, 0.5, {"8": ndcg, "64": 0.5}, 10, 900, 0.002, 1)


def test_interval_is_students() -> None:
    found = paired_difference([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.half_width == pytest.approx(4.303 * np.std([1, 2, 4], ddof=1) / math.sqrt(3))
    assert math.isnan(spread([1.0]).deviation)
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 2.0])


def test_differences_pair_the_seeds_that_both_have() -> None:
    central = [Line("EASE", "", [CentralOutcome(0.7, 0.4, 0.15, 0.07)])]
    table = quality_table(
        {
            BASELINE: {0: outcome(0.060), 1: outcome(0.070), 2: outcome(0.09)},
            "unequal": {0: outcome(0.059), 1: outcome(0.069)},
        },
        central,
        {BASELINE: 126_000, "unequal": 126_920},
    )
    assert "-0.0010 [-0.0010, -0.0010] (-1.5 %)" in table
    assert "0.0733 ± 0.0153" in table
    assert "| 126,920 " in table
    ease = next(line for line in table.splitlines() if "EASE" in line)
    assert [cell.strip() for cell in ease.split("|")][3:5] == ["0.1500", "0.0700"]
    assert "| 0.0640" in by_class_table({"unequal": {0: outcome(0.059), 1: outcome(0.069)}})


def test_rows_are_as_they_say() -> None:
    made = {row.name: row.make("ml-1m", "validation", 3) for row in ROWS}
    assert len(set(map(repr, made.values()))) == len(ROWS)
    # Untouched: whatever a row is about, the method's settings are a task's defaults.
    for name in (BASELINE, "unequal", "a fifth a round"):
        assert made[name].settings == ScatterSettings() and made[name].epochs == 10
    assert made["unequal"].classes == CLASSES
    assert made["a fifth a round"].cohort == 1208
    assert made["BPR, tuned, patent"].settings.training.scores == "columns"
    assert made["BPR, tuned, patent"].settings.aggregator == "mean"
    with pytest.raises(ValueError, match="encodes nothing"):
        replace(preset("ml-1m", "test", 0), broadcast_codec="int4")
    with pytest.raises(ValueError, match="no preset"):
        preset("netflix", "test", 0)


def two_tastes() -> LeaveOneOut:
    """Users like one half of the items or the other."""
    rng = np.random.default_rng(0)
    train = [20 * (user % 2) + rng.permutation(20)[:12] for user in range(40)]
    return hold_out_validation(train, 40, rng, latest=False, negatives=20)


def test_only_the_strong_train_or_nobody_together() -> None:
    base = replace(least_squares("ml-100k", "validation", 0), width=8, classes=(2, 8), epochs=3)
    found = {
        fleet: execute(replace(base, fleet=fleet), two_tastes(), ReferenceStep(), lambda _: None)
        for fleet in ("all", "strong", "alone")
    }
    # Whoever sees no other user cannot tell one item from the next.
    assert found["all"].last.hit_ratio > 0.8 > 0.6 > found["alone"].last.hit_ratio
    assert found["strong"].last.hit_ratio > 0.8 and found["strong"].curve != found["all"].curve
    assert {*found["alone"].by_class} == {"2", "8"} and found["alone"].last.rounds == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("loss", "codec", "broadcast_codec"),
    [
        ("bpr", "direct", "float16"),
        ("bpr", "int8", "int4"),
        ("least-squares", "direct", "float16"),
        ("least-squares", "int8", "float16"),
        ("least-squares", "int8", "int4"),
    ],
)
def test_a_run_learns_and_repeats(loss: LossName, codec: str, broadcast_codec: str) -> None:
    split = two_tastes()
    bpr = preset("ml-100k", "validation", 0).settings
    experiment = Experiment(
        "ml-100k",
        "validation",
        0,
        width=8,
        classes=(2, 8),
        epochs=30 if loss == "bpr" else 4,
        cohort=10,
        every=2,
        codec=codec,  # type: ignore[arg-type]
        broadcast_codec=broadcast_codec,  # type: ignore[arg-type]
        settings=bpr if loss == "bpr" else ScatterSettings(),
    )
    lines: list[str] = []
    found = execute(experiment, split, ReferenceStep(), lines.append)
    assert [point.rounds for point in found.curve[:2]] == [8, 16]
    assert len(lines) == experiment.epochs and found.share == 0.25
    # About half of the 20 negatives are of the other taste: chance gives 10 in 21.
    assert found.last.hit_ratio > 0.8
    assert set(found.by_class) == {"2", "8"}
    assert (found.update_bytes > 0) == (codec != "direct")
    assert found.device_seconds > 0
    again = execute(experiment, split, ReferenceStep(), lines.append)
    assert again.curve == found.curve


def test_the_channel_measures_sealed_sizes() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((100, 16)).astype(np.float32)
    update = Update(1, {"columns": np.arange(16), "rows": np.arange(0, 300, 3), "values": values})
    sizes = {}
    for codec in ("fp32", "fp16", "int8"):
        channel = ScatterChannel(codec, rng)  # type: ignore[arg-type]
        channel.down(Broadcast(1, 0, {"items": np.zeros((400, 64), dtype=np.float32)}))
        received = channel.up(update).tensors
        assert received["rows"].tolist() == list(range(0, 300, 3))
        np.testing.assert_allclose(received["values"], values, atol=0.05)
        assert channel.mean_rows == 100
        sizes[codec] = channel.mean_bytes
    # Body, frame of 23 bytes, padding to the next of eight sizes an octave, header and tag.
    body = {"fp32": 4, "fp16": 2, "int8": 1}
    for codec, size in sizes.items():
        scales = 200 if codec == "int8" else 0
        payload = 3 + 1 + 8 + 100 + 1600 * body[codec] + scales + 23
        assert size == padded_length(payload, MAX_MESSAGE_BYTES) + HEADER_BYTES + TAG_BYTES


def test_broadcasts_arrive_as_their_codec_rounds_them() -> None:
    items = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    arrived = {}
    for codec in ("float16", "int8", "int4"):
        channel = ScatterChannel("int8", np.random.default_rng(1), codec)  # type: ignore[arg-type]
        (arrived[codec],) = channel.down(Broadcast(1, 0, {"items": items})).tensors.values()
    np.testing.assert_array_equal(arrived["float16"], items.astype(np.float16))
    steps = np.abs(items).max(axis=1, keepdims=True) * 1.01
    assert (np.abs(arrived["int8"] - items) <= steps / 127).all()
    assert (np.abs(arrived["int4"] - items) <= steps / 7).all()
    assert len(np.unique(arrived["int4"][0])) <= 15


def test_bytes_down_are_those_of_the_sealed_broadcast() -> None:
    (base,) = (row.make("ml-1m", "test", 0) for row in ROWS if row.name == BASELINE)
    matrices = 2 * 128 * (3706 + 1)
    assert matrices < published_bytes(base) < 1.01 * matrices
    assert 3706 * 66 < published_bytes(replace(base, broadcast_codec="int4")) < 3706 * 66 * 1.2
    assert published_bytes(preset("ml-1m", "test", 0)) == 0  # handed over


def test_large_updates_travel_in_fragments() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((1600, 64)).astype(np.float32)
    update = Update(3, {"columns": np.arange(64), "rows": np.arange(1600), "values": values})
    channel = ScatterChannel("fp32", rng)
    channel.down(Broadcast(3, 0, {"items": np.zeros((1682, 64), dtype=np.float32)}))
    assert channel.up(update).tensors["values"].tobytes() == values.tobytes()
    around = HEADER_BYTES + FRAGMENT_BYTES + TAG_BYTES
    parts = -(-values.nbytes // MAX_PAYLOAD_BYTES)
    assert values.nbytes + parts * around < channel.mean_bytes < 1.1 * values.nbytes
