"""Popularity, EASE and iALS over made-up likes: what they score, and which items they never see."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.harness import StoredRuns
from benchmarks.recommendation.__main__ import main
from benchmarks.recommendation.baselines import ease, ials, ials_sweeps, popularity
from benchmarks.recommendation.central import CANDIDATES, Outcome, Run
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


def test_ials_goes_down_to_a_stationary_point_of_its_objective() -> None:
    split, penalty, alpha = two_tastes(), 2.0, 5.0
    taken = np.zeros((split.users, split.items))
    for user, rows in enumerate(split.train):
        taken[user, rows] = 1
    weights = 1 + alpha * taken

    def objective(users: NDArray[np.float64], items: NDArray[np.float64]) -> float:
        errors = weights * (taken - users @ items.T) ** 2
        return float(errors.sum() + penalty * ((users**2).sum() + (items**2).sum()))

    sweeps = ials_sweeps(split, penalty, alpha, np.random.default_rng(0), 3)
    found = list(islice(sweeps, 200))
    values = [objective(*each) for each in found]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(values))
    assert values[-1] < 0.9 * values[0]
    users, items = found[-1]
    errors = weights * (users @ items.T - taken)
    np.testing.assert_allclose(errors @ items + penalty * users, 0, atol=1e-3)
    np.testing.assert_allclose(errors.T @ users + penalty * items, 0, atol=1e-9)


def test_ials_finds_the_factor_that_is_known_by_hand() -> None:
    # Everybody took everything: u = v = x each, so that (1 + alpha) (1 - x^2) 2 = penalty.
    everything = np.arange(2)
    whole = LeaveOneOut(3, (everything, everything), np.array([2, 2]), (everything, everything))
    *_, (users, items) = islice(ials_sweeps(whole, 1.0, 3.0, np.random.default_rng(0), 1), 100)
    np.testing.assert_allclose(users @ items.T, [[7 / 8, 7 / 8, 0]] * 2, atol=1e-9)


def test_ials_tells_tastes_apart_and_repeats_with_its_seed() -> None:
    split = two_tastes()
    users, items = ials(split, 2.0, 5.0, np.random.default_rng(1), width=4)
    assert quality(sampled_ranks(users, items, split)).hit_ratio == 1
    again, _ = ials(split, 2.0, 5.0, np.random.default_rng(1), width=4)
    np.testing.assert_array_equal(users, again)


def test_settings_are_chosen_on_validation_items_and_the_best_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = StoredRuns[Run, Outcome](tmp_path, "recommendation", Outcome)
    for model in ("EASE", "iALS"):
        for place, settings in enumerate(CANDIDATES[model]):
            # The third is best on validation items, and worst on test items.
            score = 0.5 if place == 2 else 0.1
            for seed in range(3 if model == "iALS" else 1):
                one = Run("ml-100k", "validation", model, *settings, seed)
                stored.save(one, Outcome(0, 0, score, score))
                found = (0.3 if place == 2 else 0.9) + (model == "EASE") / 10 + seed / 100
                stored.save(replace(one, split="test"), Outcome(0, 0, found, found))
    stored.save(Run("ml-100k", "validation", "popularity"), Outcome(0, 0, 0.1, 0.1))
    stored.save(Run("ml-100k", "test", "popularity"), Outcome(0, 0, 0.35, 0.325))
    assert main(["--table-only", "--data", "ml-100k", "--results", str(tmp_path)]) == 0
    _, test_items = capsys.readouterr().out.split("test items")
    lines = [line.split(" | ") for line in test_items.splitlines() if line.startswith("| ")]
    names = [line[0].strip("| ") for line in lines[1:]]
    assert names == ["EASE, penalty 200", "popularity", "iALS, penalty 10, alpha 16"]
    cells = [[cell.strip() for cell in line[1:4]] for line in lines[1:]]
    # Student's t of 2 degrees: 4.303 * 0.01 / sqrt(3).
    assert cells[2] == ["3", "0.3100 ± 0.0100", "0.2852 to 0.3348"]
    assert cells[0] == ["", "0.4000", ""]
