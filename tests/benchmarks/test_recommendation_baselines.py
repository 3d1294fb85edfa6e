"""Popularity and EASE over made-up likes: what they score, and which items they never look at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import StoredRuns
from benchmarks.recommendation.__main__ import PENALTIES, Outcome, Run, main
from benchmarks.recommendation.baselines import ease, popularity
from benchmarks.recommendation.metrics import quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut


def two_tastes() -> LeaveOneOut:
    """60 users who each like 8 of 20 items of one taste; a ninth of it is asked for."""
    rng = np.random.default_rng(0)
    train, held_out, negatives = [], [], []
    for user in range(60):
        first = 20 * (user % 2)
        liked = first + rng.permutation(20)[:9]
        train.append(liked[:8])
        held_out.append(liked[8])
        negatives.append(np.arange(20) + 20 - first)
    return LeaveOneOut(40, tuple(train), np.asarray(held_out), tuple(negatives))


def test_popularity_counts_training_items_alone() -> None:
    split = LeaveOneOut(
        4, (np.array([0, 1]), np.array([1])), np.array([3, 2]), (np.array([2]), np.array([3]))
    )
    users, items = popularity(split)
    np.testing.assert_array_equal(items @ users[0], [1, 2, 0, 0])
    # The held-out items are as unknown as their negatives: a tie, which counts as a miss.
    assert sampled_ranks(users, items, split).tolist() == [1, 1]


def test_ease_is_the_ridge_regression_of_each_item_on_the_others() -> None:
    split = two_tastes()
    users, items = ease(split, 3.0)
    taken = users.astype(np.float64)
    for item in (0, 7, 39):
        others = np.delete(taken, item, axis=1)
        inner = others.T @ others + 3.0 * np.eye(39)
        expected = np.linalg.solve(inner, others.T @ taken[:, item])
        np.testing.assert_allclose(np.delete(items[item], item), expected, atol=1e-6)
        assert items[item, item] == 0


def test_ease_tells_tastes_apart_where_popularity_cannot() -> None:
    split = two_tastes()
    found = quality(sampled_ranks(*ease(split, 10.0), split))
    assert found.hit_ratio == 1
    assert quality(sampled_ranks(*popularity(split), split)).hit_ratio < 0.7


def test_a_penalty_is_above_nought() -> None:
    with pytest.raises(ValueError, match="penalty is 0"):
        ease(two_tastes(), 0)


def test_the_penalty_is_chosen_on_validation_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = StoredRuns[Run, Outcome](tmp_path, "recommendation", Outcome)
    for place, penalty in enumerate(PENALTIES):
        # Best on validation items and worst on test items: 100.
        score = 0.5 if penalty == 100 else 0.1
        stored.save(Run("ml-100k", "validation", "EASE", penalty), Outcome(score, score, 0, 0))
        test = Outcome((1 - score) / (place + 1), 0, 0, 0)
        stored.save(Run("ml-100k", "test", "EASE", penalty), test)
    stored.save(Run("ml-100k", "test", "popularity"), Outcome(0.25, 0.125, 0, 0))
    assert main(["--table-only", "--results", str(tmp_path)]) == 0
    _, test_items = capsys.readouterr().out.split("test items")
    assert "| popularity | 0.2500" in test_items and "| EASE, 100  | 0.1667" in test_items
    assert "EASE, 20 " not in test_items
