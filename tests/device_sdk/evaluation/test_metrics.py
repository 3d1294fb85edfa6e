"""Statistics of parts add up to those of the whole, and give what other libraries compute."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, log_loss, mean_absolute_error, roc_auc_score

from device_sdk.evaluation.metrics import (
    METRICS,
    Auc,
    Calibration,
    PredictionMetric,
    RankMetric,
    Scale,
    draw_negatives,
    full_rank,
    metric_of,
    sampled_rank,
)

Floats = NDArray[np.float64]


def prediction(name: str) -> PredictionMetric:
    found = metric_of(name)
    assert isinstance(found, PredictionMetric)
    return found


def ranking(name: str) -> RankMetric:
    found = metric_of(name)
    assert isinstance(found, RankMetric)
    return found


def of_parts(name: str, output: Any, target: Any, scale: Scale = "logits", parts: int = 7) -> float:
    """The figure from the statistics of so many parts, added up."""
    metric = prediction(name)
    total = np.zeros(metric.size)
    for rows in np.array_split(np.arange(len(output)), parts):
        total += metric.measure(output[rows], target[rows], scale)
    metric.check(total)
    return metric.value(total)


def test_classes_agree_with_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((500, 4)).astype(np.float32)
    labels = rng.integers(4, size=500)
    powers = np.exp(logits.astype(np.float64))
    likely = powers / powers.sum(axis=1, keepdims=True)
    for output, scale in ((logits, "logits"), (likely, "probabilities")):
        found = of_parts("accuracy", output, labels, scale)
        assert found == accuracy_score(labels, logits.argmax(axis=1))
        assert of_parts("log_loss", output, labels, scale) == pytest.approx(
            log_loss(labels, likely), abs=1e-9
        )


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_two_classes_agree_with_scikit_learn(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    clicks = rng.integers(2, size=800)
    logits = rng.standard_normal(800) * 2 + clicks
    likely = 1 / (1 + np.exp(-logits))
    for output, scale in ((logits, "logits"), (likely, "probabilities")):
        rows = output.reshape(shape)
        target = clicks.astype(np.float32).reshape(shape)
        assert of_parts("accuracy", rows, target, scale) == accuracy_score(clicks, likely > 0.5)
        assert of_parts("log_loss", rows, target, scale) == pytest.approx(
            log_loss(clicks, likely), abs=1e-9
        )


@pytest.mark.parametrize("shape", [(60,), (60, 1), (60, 3, 2)])
def test_errors_agree_with_scikit_learn(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    output, target = rng.standard_normal(shape), rng.standard_normal(shape)
    flat = output.reshape(60, -1), target.reshape(60, -1)
    assert of_parts("mae", output, target) == pytest.approx(mean_absolute_error(*flat), abs=1e-12)
    squares = np.mean((output - target) ** 2)
    assert of_parts("rmse", output, target) == pytest.approx(math.sqrt(squares), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(5, 400), st.sampled_from([0.02, 0.3, 3.0, 12.0]))
def test_auc_lies_within_its_bound(seed: int, count: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    clicks = rng.permutation(np.arange(count) % 3 == 0).astype(np.int64)
    logits = spread * rng.standard_normal(count) + clicks * spread / 2
    auc = Auc()
    statistics = sum(
        (auc.measure(logits[rows], clicks[rows]) for rows in np.array_split(np.arange(count), 3)),
        np.zeros(auc.size),
    )
    exact = roc_auc_score(clicks, 1 / (1 + np.exp(-logits)))
    assert abs(auc.value(statistics) - exact) <= auc.error_bound(statistics) + 1e-12


def test_auc_of_ordinary_scores_is_close() -> None:
    rng = np.random.default_rng(3)
    clicks = (rng.random(20_000) < 0.02).astype(np.int64)
    logits = rng.standard_normal(20_000) - 4 + clicks
    auc = Auc()
    statistics = auc.measure(logits, clicks)
    assert abs(auc.value(statistics) - roc_auc_score(clicks, logits)) < 5e-4
    assert auc.error_bound(statistics) < 0.02


def test_auc_of_one_class_is_not_defined() -> None:
    auc = Auc()
    statistics = auc.measure(np.array([0.5, 2.0]), np.array([1, 1]))
    assert math.isnan(auc.value(statistics))
    assert math.isnan(auc.error_bound(statistics))
    assert auc.weight(statistics) == 2


def test_calibration_is_the_gap_of_confidence_and_hits() -> None:
    metric = Calibration()
    likely = np.array([0.9, 0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1])
    sure = metric.measure(likely, np.array([1, 1, 1, 1, 0, 0, 0, 0]), "probabilities")
    assert metric.value(sure) == pytest.approx(0.1)
    three_of_four = metric.measure(likely, np.array([1, 1, 1, 0, 0, 0, 0, 1]), "probabilities")
    assert metric.value(three_of_four) == pytest.approx(0.15)
    rows = np.stack([1 - likely, likely], axis=1)
    both = metric.measure(rows, np.array([1, 1, 1, 1, 0, 0, 0, 0]), "probabilities")
    assert metric.value(both) == pytest.approx(0.1)


def test_ranks_become_hits_and_gains() -> None:
    ranks = np.array([0, 2, 9, 10, 500])
    for name, expected in (("hr10", 3 / 5), ("ndcg10", (1 + 0.5 + 1 / math.log2(11)) / 5)):
        for form in (name, f"{name}_all"):
            metric = ranking(form)
            total = metric.measure(ranks[:2]) + metric.measure(ranks[2:])
            metric.check(total)
            assert metric.value(total) == pytest.approx(expected)
    assert not ranking("hr10").among_all
    assert ranking("ndcg10_all").among_all


def test_ranks_count_ties_against_the_item_and_look_at_no_training_item() -> None:
    items = np.array([[1.0], [3.0], [2.0], [2.0], [0.0]], dtype=np.float32)
    user = np.ones(1, dtype=np.float32)
    assert full_rank(user, items, 2, np.array([1])) == 1, "item 3 ties, item 1 is left out"
    assert full_rank(user, items, 2, np.array([], dtype=np.int64)) == 2
    assert sampled_rank(user, items, 2, np.array([0, 3, 4])) == 1
    rng = np.random.default_rng(1)
    for size in (8, 16, 64):  # in many dimensions too, wherever the rows stand
        same = np.tile(rng.standard_normal(size).astype(np.float32), (1003, 1))
        user, others = rng.standard_normal(size).astype(np.float32), np.arange(99)
        for target in (99, 500, 1002):
            assert sampled_rank(user, same, target, others) == 99
            assert full_rank(user, same, target, others) == 1003 - 99 - 1
    drawn = draw_negatives(300, np.array([5, 6, 7]), np.random.default_rng(0))
    assert len(drawn) == len(set(drawn.tolist())) == 99
    assert not {5, 6, 7} & set(drawn.tolist())
    assert draw_negatives(5, np.array([1, 2]), np.random.default_rng(0)).tolist() == [0, 3, 4]


def test_extreme_logits_do_not_overflow() -> None:
    logits = np.array([1e30, -1e30, 800.0, -800.0])
    labels = np.array([1, 0, 0, 1])
    with np.errstate(all="raise", under="ignore"):
        assert of_parts("accuracy", logits, labels, parts=1) == 0.5
        assert of_parts("log_loss", logits, labels, parts=1) == pytest.approx(-math.log(1e-7) / 2)
        rows = np.stack([-logits, logits], axis=1)
        assert of_parts("accuracy", rows, labels, parts=1) == 0.5


@pytest.mark.parametrize(
    ("name", "output", "target", "said"),
    [
        ("accuracy", np.zeros((3, 2)), np.zeros(2), "a class for each sample"),
        ("accuracy", np.zeros((3, 2, 2)), np.zeros(3), r"expected \[n, classes\]"),
        ("accuracy", np.zeros((3, 2)), np.array([0, 1, 2]), "no class from 0 to 1"),
        ("accuracy", np.zeros(3), np.array([0, 1, -1]), "no class from 0 to 1"),
        ("log_loss", np.zeros((2, 2)), np.array([0.0, 0.5]), "no class"),
        ("log_loss", np.zeros((2, 2)), np.array([0.0, np.nan]), "no class"),
        ("accuracy", np.array([np.nan, 1.0]), np.zeros(2), "not finite"),
        ("auc", np.zeros((2, 3)), np.zeros(2), "two classes"),
        ("calibration", np.array([0.5, 1.2]), np.zeros(2), "no probabilities"),
        ("mae", np.zeros((2, 3)), np.zeros((2, 2)), "expected the same"),
        ("mae", np.zeros(0), np.zeros(0), "no samples"),
        ("rmse", np.array([np.inf]), np.zeros(1), "not finite"),
        ("rmse", np.array([1e13]), np.zeros(1), "above 1e"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name: str, output: Any, target: Any, said: str) -> None:
    scale: Scale = "probabilities" if name == "calibration" else "logits"
    with pytest.raises(ValueError, match=said):
        prediction(name).measure(output, target, scale)


def test_an_unknown_metric_is_named_beside_those_there_are() -> None:
    with pytest.raises(ValueError, match="'f1' is unknown; known are loss, accuracy"):
        metric_of("f1")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("loss", {0: 0.0}),
        ("loss", {0: -1.0}),
        ("loss", {1: math.inf}),
        ("loss", {1: 1e300}),
        ("accuracy", {1: 5.0}),
        ("log_loss", {1: -0.1}),
        ("log_loss", {1: 4 * 17.0}),
        ("mae", {1: -1.0}),
        ("mae", {1: 1e13}),
        ("rmse", {1: -1.0}),
        ("hr10", {1: 5.0}),
        ("ndcg10", {1: 4.5}),
        ("auc", {7: -1.0}),
        ("calibration", {15: 40.0}),
        ("calibration", {30: -1.0}),
        ("calibration", {44: 9.0}),
    ],
)
def test_statistics_that_no_data_has_are_refused(name: str, changed: dict[int, float]) -> None:
    metric = METRICS[name]
    honest = _honest(name)
    metric.check(honest)
    for place, value in changed.items():
        honest[place] = value
    with pytest.raises(ValueError, match=name):
        metric.check(honest)


def _honest(name: str) -> Floats:
    metric = METRICS[name]
    if isinstance(metric, PredictionMetric):
        likely = np.array([0.01, 0.5, 0.6, 0.99])
        target = np.array([0, 1, 0, 1])
        return metric.measure(likely, target, "probabilities")
    if isinstance(metric, RankMetric):
        return metric.measure(np.array([0, 3, 12, 2]))
    return np.array([4.0, 2.0])


def test_statistics_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="accuracy has 2 statistics"):
        METRICS["accuracy"].check(np.zeros(3))
