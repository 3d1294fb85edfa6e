from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.recommendation.click_metrics import click_quality, mean_ndcg


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
