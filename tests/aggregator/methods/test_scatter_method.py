from __future__ import annotations

import pickle

import numpy as np
import pytest

from aggregator.methods.fleet import clip_factor
from aggregator.methods.method import Refused
from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.server_optimizer import OptimizerSettings, ServerOptimizer
from device_sdk.methods.scatter.contract import BprTraining
from device_sdk.wire.arrays.exchange import Update

ITEMS, K = 12, 6
PLAIN = OptimizerSettings(name="plain", learning_rate=1.0)


BPR = ScatterSettings("bpr")


def method(chosen: ScatterSettings = BPR) -> ScatterMethod:
    return ScatterMethod(initial_items(ITEMS, K, 0.1, np.random.default_rng(0)), chosen)


def update(round_id: int, rows: list[int], columns: list[int], seed: int = 0) -> Update:
    values = np.random.default_rng(seed).standard_normal((len(rows), len(columns)))
    return Update(
        round_id,
        {
            "rows": np.asarray(rows, dtype=np.int64),
            "columns": np.asarray(columns, dtype=np.int64),
            "values": values.astype(np.float32),
        },
    )


def scattered(one: Update) -> np.ndarray:
    full = np.zeros((ITEMS, K))
    for i, row in enumerate(one.tensors["rows"]):
        for j, column in enumerate(one.tensors["columns"]):
            full[row, column] = one.tensors["values"][i, j]
    return full


@pytest.mark.parametrize("aggregator", ["mean", "coverage"])
def test_aggregation_is_the_average_of_scattered_gradients(aggregator: str) -> None:
    one = method(ScatterSettings("bpr", aggregator=aggregator, optimizer=PLAIN))  # type: ignore[arg-type]
    before = one.open_round(1).tensors["items"]
    updates = [
        update(1, [0, 3, 11], [1, 4], 1),
        update(1, [3], list(range(K)), 2),
        update(1, [], [1, 5], 3),
    ]
    for each in updates:
        one.check(each)
        one.absorb(each)
    summary = one.close_round()
    total = sum(scattered(each) for each in updates)
    drawn = np.array([1, 3, 1, 1, 2, 2])
    expected = before - total / (3 if aggregator == "mean" else drawn)
    np.testing.assert_allclose(one.items, expected, rtol=1e-5, atol=1e-6)
    assert (summary.round_id, summary.version, summary.participants) == (1, 1, 3)
    assert summary.metrics["columns_mean"] == pytest.approx(10 / 3)


def test_coverage_leaves_columns_alone_that_nobody_drew() -> None:
    one = method(ScatterSettings("bpr", optimizer=PLAIN))
    before = one.open_round(1).tensors["items"]
    one.absorb(update(1, [2], [0]))
    one.close_round()
    assert np.array_equal(one.items[:, 1:], before[:, 1:])
    assert one.items[2, 0] != before[2, 0]


def test_broadcast_tells_the_training_settings_at_the_decayed_rate() -> None:
    training = BprTraining(user_learning_rate=0.4, most_triples=7)
    optimizer = OptimizerSettings(decay=0.5)
    one = method(ScatterSettings("bpr", optimizer=optimizer, training=training))
    for round_id, rate in ((1, 0.4), (2, 0.2), (3, 0.1)):
        told = BprTraining.from_scalars(one.open_round(round_id).settings)
        assert told.user_learning_rate == pytest.approx(rate)
        assert told.most_triples == 7
        one.absorb(update(round_id, [0], [0]))
        one.close_round()


def test_clipping_bounds_the_norm() -> None:
    one = method(ScatterSettings("bpr", optimizer=PLAIN, clip_norm=0.5))
    before = one.open_round(1).tensors["items"]
    one.absorb(update(1, [0, 3, 4], [0, 1, 2]))
    assert one.close_round().metrics["clipped"] == 1
    assert np.linalg.norm(one.items - before) == pytest.approx(0.5, rel=1e-5)
    assert clip_factor(np.full(4, 1e30, dtype=np.float32), 1.0) == pytest.approx(5e-31)
    assert clip_factor(np.ones(4, dtype=np.float32), 0) == 1
    assert clip_factor(np.empty(0, dtype=np.float32), 1) == 1


def test_adam_matches_the_paper() -> None:
    chosen = OptimizerSettings(learning_rate=0.1, beta1=0.9, beta2=0.99, epsilon=1e-4)
    optimizer = ServerOptimizer(chosen, (2, 3))
    rng = np.random.default_rng(0)
    found = np.ones((2, 3), dtype=np.float32)
    expected = found.astype(np.float64)
    m = v = np.zeros((2, 3))
    for t in range(1, 6):
        gradient = rng.standard_normal((2, 3)).astype(np.float32)
        found = optimizer.step(found, gradient)
        m = 0.9 * m + 0.1 * gradient
        v = 0.99 * v + 0.01 * gradient.astype(np.float64) ** 2
        expected -= 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_catalogue_grows_between_rounds_only() -> None:
    one = method()
    one.open_round(1)
    one.absorb(update(1, [0], [0]))
    new = np.full((3, K), 0.5, dtype=np.float32)
    with pytest.raises(ValueError, match="between rounds"):
        one.grow(new)
    one.close_round()
    one.grow(new)
    assert one.version == 2
    grown = update(2, [0, ITEMS + 2], [0])
    with pytest.raises(Refused):
        one.check(grown)
    assert one.open_round(2).tensors["items"].shape == (ITEMS + 3, K)
    one.check(grown)
    one.absorb(grown)
    one.close_round()
    for bad in (np.ones((1, K - 1), np.float32), np.full((1, K), np.nan, np.float32)):
        with pytest.raises(ValueError, match="new rows"):
            one.grow(bad)


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("bad-columns", {"columns": np.array([], dtype=np.int64)}),
        ("bad-columns", {"columns": np.array([1, 1])}),
        ("bad-columns", {"columns": np.array([0, K])}),
        ("bad-columns", {"columns": np.array([0, 1], dtype=np.int32)}),
        ("bad-rows", {"rows": np.array([3, 2])}),
        ("bad-rows", {"rows": np.array([-1, 2])}),
        ("bad-rows", {"rows": np.array([0, ITEMS])}),
        ("bad-rows", {"rows": np.array([[0, 1]])}),
        ("bad-values", {"values": np.zeros((2, 3), dtype=np.float32)}),
        ("bad-values", {"values": np.zeros((2, 2), dtype=np.float16)}),
        ("bad-values", {"values": np.array([[0, 1], [np.nan, 0]], dtype=np.float32)}),
        ("bad-values", {"values": np.array([[0, 1], [-np.inf, 0]], dtype=np.float32)}),
        ("bad-values", {"values": np.array([[0, 1], [1e13, 0]], dtype=np.float32)}),
        ("bad-tensors", {"more": np.zeros(1, dtype=np.float32)}),
    ],
)
def test_bad_updates_are_refused_by_reason(reason: str, changed: dict[str, np.ndarray]) -> None:
    one = method()
    one.open_round(1)
    good = update(1, [0, 1], [2, 3])
    one.check(good)
    with pytest.raises(Refused) as caught:
        one.check(Update(1, {**good.tensors, **changed}))
    assert caught.value.reason == reason
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), Refused)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="aggregator"):
        ScatterSettings("bpr", aggregator="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip_norm"):
        ScatterSettings(clip_norm=-1)
    for name, value in (
        ("name", "lamb"),
        ("learning_rate", 0),
        ("beta1", 1),
        ("epsilon", 0),
        ("decay", 0),
    ):
        with pytest.raises(ValueError, match=name):
            OptimizerSettings(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float32"):
        ScatterMethod(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="not finite"):
        ScatterMethod(np.full((2, 2), np.inf, dtype=np.float32))
