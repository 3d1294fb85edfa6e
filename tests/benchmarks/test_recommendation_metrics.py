from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.recommendation.click_metrics import click_quality, mean_ndcg
from benchmarks.recommendation.metrics import full_ranks, quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut, hold_out_validation

ONE = np.ones((2, 1), dtype=np.float32)


def split() -> LeaveOneOut:
    return LeaveOneOut(
        items=6,
        train=(np.array([0, 1]), np.array([5])),
        held_out=np.array([2, 3]),
        negatives=(np.array([3, 4, 2]), np.array([0, 1])),
    )


def test_ranks_by_hand() -> None:
    items = np.array([[9], [8], [3], [4], [3], [7]], dtype=np.float32)
    # User 0: 3 is above its item 2, 4 ties with it; its own item among the negatives is dropped.
    assert sampled_ranks(ONE, items, split()).tolist() == [2, 2]
    # Full: user 0 may not be asked about 0 and 1; user 1 not about 5.
    assert full_ranks(ONE, items, split()).tolist() == [3, 2]


def test_quality_by_hand() -> None:
    found = quality(np.array([0, 2, 9, 10]))
    assert found.hit_ratio == 0.75
    assert found.ndcg == pytest.approx((1 + 1 / math.log2(4) + 1 / math.log2(11)) / 4)


def test_constant_scores_find_nothing() -> None:
    items = np.zeros((6, 1), dtype=np.float32)
    assert quality(sampled_ranks(ONE, items, split()), n=1).hit_ratio == 0
    assert quality(full_ranks(ONE, items, split()), n=1).hit_ratio == 0


def test_nan_is_no_hit() -> None:
    items = np.full((6, 1), np.nan, dtype=np.float32)
    for ranks in (sampled_ranks, full_ranks):
        with pytest.raises(ValueError, match="not finite"):
            ranks(ONE, items, split())


def test_split_refuses_a_leak() -> None:
    with pytest.raises(ValueError, match="in its training data"):
        LeaveOneOut(4, (np.array([1, 2]),), np.array([2]), (np.array([0]),))
    with pytest.raises(ValueError, match="outside the catalogue"):
        LeaveOneOut(2, (np.array([1, 2]),), np.array([0]), (np.array([0]),))
    with pytest.raises(ValueError, match="training sets"):
        LeaveOneOut(2, (), np.array([0]), (np.array([1]),))


@pytest.mark.parametrize("latest", [True, False])
def test_validation_takes_one_training_item_and_true_negatives(latest: bool) -> None:
    train = [np.array([4, 2, 9]), np.array([1, 0])]
    found = hold_out_validation(train, 20, np.random.default_rng(1), latest=latest, negatives=10)
    for user, rows in enumerate(train):
        assert sorted([*found.train[user], found.held_out[user]]) == sorted(rows)
        assert len(found.negatives[user]) == 10
        assert not set(found.negatives[user]) & set(rows)
    if latest:
        assert found.held_out.tolist() == [9, 0]


def test_quality_of_known_predictions() -> None:
    clicks = np.array([1, 0, 1, 0])
    found = click_quality(
        clicks, np.array([0.9, 0.2, 0.4, 0.6], np.float32), np.array([0, 0, 1, 1])
    )
    assert found.accuracy == 0.5
    assert found.auc == pytest.approx(3 / 4)
    assert found.mae == pytest.approx((0.1 + 0.2 + 0.6 + 0.6) / 4)
    assert found.loss == pytest.approx(-np.log([0.9, 0.8, 0.4, 0.4]).mean())
    assert found.ndcg == pytest.approx((1 + 1 / math.log2(3)) / 2)


def test_ndcg_is_of_each_users_own_ranking_cut_at_five() -> None:
    clicks = np.array([0, 0, 0, 0, 0, 1, 1])
    users = np.zeros(7, dtype=np.int64)
    best_first = np.arange(7, 0, -1, dtype=float)
    assert mean_ndcg(clicks, best_first, users) == 0
    assert mean_ndcg(clicks, -best_first, users) == 1


def test_ties_gain_nothing_and_users_without_a_choice_do_not_count() -> None:
    users = np.array([0, 0, 0, 1, 1, 2])
    clicks = np.array([0, 0, 1, 1, 1, 0])
    assert mean_ndcg(clicks, np.zeros(6), users) == pytest.approx(1 / math.log2(4))
    assert math.isnan(
        mean_ndcg(np.ones(3, dtype=np.int64), np.zeros(3), np.zeros(3, dtype=np.int64))
    )
