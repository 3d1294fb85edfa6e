"""The attack on lists of likes, and that the documents promise no more than it leaves over."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.methods.scatter import ScatterMethod, initial_items
from benchmarks.harness import StoredRuns
from benchmarks.privacy.__main__ import attack_table, joining_table
from benchmarks.privacy.attack import LikesModel, evidence, liked_by_size, ranking_quality, sight
from benchmarks.privacy.experiment import DEFAULT, ROWS, Outcome, Run, execute
from benchmarks.recommendation.split import LeaveOneOut, hold_out_validation
from benchmarks.scatter.experiment import least_squares, preset
from benchmarks.simulation import scatter_fleet
from device_sdk.methods.scatter.contract import LossName
from device_sdk.methods.scatter.triples import PoolSettings
from tests.fakes.reference_step import ReferenceStep

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "methods" / "scatter" / "privacy.md"
STORED = ROOT / "benchmarks" / "results"
ITEMS, USERS, LIKES = 200, 80, 15


@pytest.fixture(scope="module")
def split() -> LeaveOneOut:
    """Every item as popular as any other: what is found is found in the updates."""
    rng = np.random.default_rng(0)
    train = [rng.choice(ITEMS, size=LIKES + 1, replace=False) for _ in range(USERS)]
    return hold_out_validation(train, ITEMS, rng, latest=False, negatives=50)


def small(pool: PoolSettings, *, epochs: int, users: int = 1, loss: LossName = "bpr") -> Run:
    of = preset if loss == "bpr" else least_squares
    base = of("ml-100k", "validation", 0)
    experiment = replace(
        base, width=16, classes=(16,), epochs=epochs, every=epochs, cohort=20, codec="int8"
    )
    return Run(replace(experiment, pool=pool), users)


def attacked(split: LeaveOneOut, run: Run) -> Outcome:
    return execute(run, split, ReferenceStep(), lambda line: None)


def test_the_first_update_of_a_device_gives_its_likes_away(split: LeaveOneOut) -> None:
    """What docs/threat-model/aggregator.md says of BPR with pseudo-items, and no better."""
    found = attacked(split, small(PoolSettings(pseudo_per_positive=0.5), epochs=6))
    assert found.first_by_size.precision > 0.97 and found.first_by_size.recall > 0.97
    assert found.every.precision > 0.97 and found.every.recall > 0.97
    assert found.every.auc > 0.99
    assert found.joined["0"].auc > 0.97


@pytest.mark.parametrize("users", [1, 4])
def test_every_row_that_least_squares_names_is_liked(split: LeaveOneOut, users: int) -> None:
    """What docs/threat-model/aggregator.md says of the default: there is nothing to tell apart."""
    found = attacked(split, small(PoolSettings(), epochs=3, users=users, loss="least-squares"))
    assert found.first.precision == found.every.precision == 1
    assert found.first.recall == found.every.recall == 1
    assert found.first_by_size.precision == 1


def test_pseudo_items_hide_in_least_squares_what_they_weigh(split: LeaveOneOut) -> None:
    for weight, precision in ((0.1, 1.0), (1.0, 1 / 3)):
        pool = PoolSettings(pseudo_per_positive=2.0, pseudo_weight=weight)
        found = attacked(split, small(pool, epochs=1, loss="least-squares"))
        assert found.first_by_size.precision == pytest.approx(precision, abs=0.05)
        assert found.first_by_size.recall > 0.97


def test_weights_of_one_leave_an_attack_on_sizes_the_first_update_s_base_rate(
    split: LeaveOneOut,
) -> None:
    """And no more than that: over the rounds the model itself tells."""
    pool = PoolSettings(pseudo_per_positive=2.0, pseudo_weight=1.0)
    found = attacked(split, small(pool, epochs=1))
    assert found.first_by_size.recall > 0.97
    assert found.first_by_size.precision == pytest.approx(1 / 3, abs=0.05)
    assert found.first.auc == pytest.approx(0.5, abs=0.1)
    assert found.every == found.first


def test_several_users_on_a_device_are_told_apart() -> None:
    rng = np.random.default_rng(3)
    likes = [rng.choice(ITEMS, size=LIKES, replace=False) for _ in range(3)]
    (one,) = scatter_fleet([likes], [64], ReferenceStep(), np.random.SeedSequence(2))
    method = ScatterMethod(initial_items(ITEMS, 64, 0.01, rng))
    update = one.train(method.open_round(1))
    popular = np.zeros(ITEMS)
    popular[np.concatenate(likes)] = 1
    seen = sight(update, method.items, popular, 3)
    said = liked_by_size(seen, 0.1)
    true = np.unique(np.concatenate(likes))
    right = len(np.intersect1d(said, true))
    assert right > 0.9 * len(said) and right > 0.9 * len(true)


def test_an_attack_that_learns_finds_what_it_was_taught() -> None:
    rng = np.random.default_rng(1)
    popularity = rng.integers(1, 50, size=ITEMS).astype(np.float64)
    (one,) = scatter_fleet(
        [[np.arange(0, 40, 2)]], [16], ReferenceStep(), np.random.SeedSequence(2)
    )
    method = ScatterMethod(initial_items(ITEMS, 16, 0.01, rng))
    popularity[np.arange(0, 40, 2)] += 100
    message = method.open_round(1)
    updates = [one.train(message) for _ in range(2)]
    found = evidence([sight(u, method.items, popularity, 1) for u in updates], popularity)
    truth = np.isin(found.rows, np.arange(0, 40, 2))
    chances = LikesModel([(found, truth)]).chances(found)
    assert ((chances > 0.5) == truth).all()


def test_ranking_quality_is_the_area_under_the_curve() -> None:
    assert ranking_quality(np.array([3.0, 4.0]), np.array([1.0, 2.0])) == 1
    assert ranking_quality(np.array([1.0]), np.array([1.0, 2.0])) == 0.25
    assert math.isnan(ranking_quality(np.array([1.0]), np.array([])))


def test_the_document_shows_the_stored_figures_and_no_better_ones() -> None:
    """Whoever changes what is measured, or what is said, has to do both."""
    store = StoredRuns(STORED, "privacy", Outcome)
    found = {
        row.name: {
            seed: outcome
            for seed in range(3)
            if (outcome := store.load(row.make(seed, 20))) is not None
        }
        for row in ROWS
    }
    assert found[DEFAULT]
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    for table in (attack_table(found), joining_table(found)):
        for line in table.splitlines()[2:]:
            assert " ".join(line.split()) in text, line
