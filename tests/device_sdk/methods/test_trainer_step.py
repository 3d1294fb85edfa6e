"""The exported train step and NumPy's, against the formula in float64 and each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.errors import RuntimeMissing
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.factor_step import (
    FactorBatch,
    FactorGradients,
    FactorStep,
    NumpyStep,
    StepByUsers,
    TrainerStep,
)
from device_sdk.trainer import Trainer
from tests.fakes.reference_step import ReferenceStep


@pytest.fixture(scope="module")
def graph() -> TrainerStep:
    return TrainerStep(Trainer(packaged_artifact(), providers="cpu"))


@pytest.fixture(params=["graph", "numpy"])
def step(request: pytest.FixtureRequest, graph: TrainerStep) -> FactorStep:
    return graph if request.param == "graph" else NumpyStep()


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
    step: FactorStep, users: int, items: int, k: int, triples: int
) -> None:
    rng = np.random.default_rng(users + triples)
    user_matrix = rng.standard_normal((users, k), dtype=np.float32)
    item_matrix = rng.standard_normal((items, k), dtype=np.float32)
    batch = random_batch(rng, users, items, triples)
    found = step.gradients(user_matrix, item_matrix, batch)
    expected = ReferenceStep().gradients(user_matrix, item_matrix, batch)
    for ours, theirs in ((found.users, expected.users), (found.items, expected.items)):
        assert ours.shape == theirs.shape
        # The gradient is read off as old - new, so the parameters' own rounding enters.
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-6 * max(1, triples / users))


def test_the_learners_arrays_stay_as_they_are(step: FactorStep) -> None:
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


def test_a_diverged_user_is_reported(step: FactorStep) -> None:
    rng = np.random.default_rng(0)
    users = np.full((1, 4), 3e38, dtype=np.float32)
    items = rng.standard_normal((6, 4), dtype=np.float32)
    with pytest.raises(LearnerError, match="not finite"):
        step.gradients(users, items, random_batch(rng, 1, 6, 9))


@settings(max_examples=150, deadline=None)
@given(
    users=st.integers(1, 30),
    rows=st.integers(1, 200),
    k=st.integers(1, 70),
    triples=st.integers(1, 400),
    spread=st.sampled_from([1e-3, 0.1, 1.0, 10.0]),
    seed=st.integers(0, 2**32),
)
def test_the_two_steps_give_the_same_answers(
    graph: TrainerStep, users: int, rows: int, k: int, triples: int, spread: float, seed: int
) -> None:
    """Within float32's rounding of what was summed; duplicates, ties and weights of 0 included."""
    rng = np.random.default_rng(seed)
    scale = np.float32(spread)
    user_matrix = scale * rng.standard_normal((users, k), dtype=np.float32)
    item_matrix = scale * rng.standard_normal((rows, k), dtype=np.float32)
    batch = FactorBatch(
        user=rng.integers(users, size=triples),
        positive=rng.integers(rows, size=triples),
        negative=rng.integers(rows, size=triples),
        weight=rng.choice([0.0, 0.1, 1.0, 3.0], size=triples).astype(np.float32),
        offset=rng.standard_normal(triples).astype(np.float32),
        user_l2=float(rng.choice([0.0, 0.02])),
        item_l2=float(rng.choice([0.0, 0.003])),
    )
    ours = NumpyStep().gradients(user_matrix, item_matrix, batch)
    theirs = graph.gradients(user_matrix, item_matrix, batch)
    exact = ReferenceStep().gradients(user_matrix, item_matrix, batch)
    largest = max(np.abs(user_matrix).max(), np.abs(item_matrix).max())
    # A score's rounding moves a sigmoid by as much, and with it each term of a sum.
    margin = 1e-6 * k * float(largest) ** 2
    most = np.bincount(batch.user, batch.weight).max() * float(largest)
    for one, other, true in (
        (ours.users, theirs.users, exact.users),
        (ours.items, theirs.items, exact.items),
    ):
        assert one.dtype == other.dtype == np.float32 and one.shape == other.shape
        tolerance = (margin + 1e-5) * most + 1e-6 * float(largest)
        np.testing.assert_allclose(one, true, rtol=1e-4, atol=tolerance)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2 * tolerance)


class _Counting:
    """A step that says how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def gradients(self, *arguments: Any) -> FactorGradients:
        self.asked += 1
        return NumpyStep().gradients(*arguments)


def test_the_number_of_users_alone_says_which_step_is_taken() -> None:
    rng = np.random.default_rng(0)
    graph, opened = _Counting(), []

    def open_graph() -> _Counting:
        opened.append(1)
        return graph

    step = StepByUsers(open_graph)

    def ask(users: int, rows: int, triples: int) -> None:
        matrices = (rng.standard_normal((n, 4), dtype=np.float32) for n in (users, rows))
        step.gradients(*matrices, random_batch(rng, users, rows, triples))  # type: ignore[misc]

    ask(1, 2, 1)
    ask(1, 800, 900)
    assert not opened
    ask(2, 2, 9)
    ask(50, 100, 60)
    assert (opened, graph.asked) == ([1], 2)
    ask(1, 80, 20)
    assert graph.asked == 2


def test_without_onnxruntime_every_step_is_numpys() -> None:
    def open_graph() -> FactorStep:
        raise RuntimeMissing("no onnxruntime")

    rng = np.random.default_rng(0)
    users, items = (rng.standard_normal((n, 4), dtype=np.float32) for n in (30, 90))
    batch = random_batch(rng, 30, 90, 5)
    step = StepByUsers(open_graph)
    for _ in range(2):
        found = step.gradients(users, items, batch)
        assert np.array_equal(found.items, NumpyStep().gradients(users, items, batch).items)
