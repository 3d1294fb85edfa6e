"""The exported train step against the formula in float64."""

from __future__ import annotations

import numpy as np
import pytest

from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.factor_step import FactorBatch, TrainerStep
from device_sdk.trainer import Trainer
from tests.fakes.reference_step import ReferenceStep


@pytest.fixture(scope="module")
def step() -> TrainerStep:
    return TrainerStep(Trainer(packaged_artifact(), providers="cpu"))


def random_batch(rng: np.random.Generator, users: int, items: int, triples: int) -> FactorBatch:
    return FactorBatch(
        user=rng.integers(users, size=triples),
        positive=rng.integers(items, size=triples),
        negative=rng.integers(items, size=triples),
        weight=rng.choice([1.0, 0.1], size=triples).astype(np.float32),
        offset=rng.standard_normal(triples).astype(np.float32),
        user_l2=0.02,
        item_l2=0.003,
    )


# Sizes in an order that makes one session grow, shrink and come back.
@pytest.mark.parametrize(
    ("users", "items", "k", "triples"),
    [(1, 2, 1, 1), (3, 40, 16, 25), (1, 500, 64, 300), (3, 40, 16, 31), (20, 9, 8, 200)],
)
def test_gradients_are_the_references(
    step: TrainerStep, users: int, items: int, k: int, triples: int
) -> None:
    rng = np.random.default_rng(users + triples)
    user_matrix = rng.standard_normal((users, k), dtype=np.float32)
    item_matrix = rng.standard_normal((items, k), dtype=np.float32)
    batch = random_batch(rng, users, items, triples)
    found = step.gradients(user_matrix, item_matrix, batch)
    expected = ReferenceStep().gradients(user_matrix, item_matrix, batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for ours, theirs in ((found.users, expected.users), (found.items, expected.items)):
        assert ours.shape == theirs.shape
        # The gradient is read off as old - new, so the parameters' own rounding enters.
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-6 * max(1, triples / users))


def test_the_learners_arrays_stay_as_they_are(step: TrainerStep) -> None:
    rng = np.random.default_rng(0)
    users = rng.standard_normal((2, 4), dtype=np.float32)
    items = rng.standard_normal((6, 4), dtype=np.float32)
    kept = users.copy(), items.copy()
    batch = random_batch(rng, 2, 6, 9)
    first = step.gradients(users, items, batch)
    frozen = first.items.copy()
    step.gradients(items[:2].copy(), users[:2].copy(), random_batch(rng, 2, 2, 3))
    assert np.array_equal(users, kept[0])
    assert np.array_equal(items, kept[1])
    assert np.array_equal(first.items, frozen)


def test_a_diverged_user_is_reported(step: TrainerStep) -> None:
    rng = np.random.default_rng(0)
    users = np.full((1, 4), 3e38, dtype=np.float32)
    items = rng.standard_normal((6, 4), dtype=np.float32)
    with pytest.raises(LearnerError, match="not finite"):
        step.gradients(users, items, random_batch(rng, 1, 6, 9))
