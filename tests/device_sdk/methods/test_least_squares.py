"""What a device solves and hands in under least squares, against the dense formulas in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.methods.scatter_loss import LeastSquaresLoss, LeastSquaresSettings
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.contract import (
    LEAST_SQUARES_TENSORS,
    BprTraining,
    LeastSquaresTraining,
    decode_scatter_update,
    encode_scatter_update,
)
from device_sdk.methods.scatter.factor_step import NumpyStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.least_squares import LeastSquares, Likes
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.wire.arrays.exchange import Broadcast

ITEMS, K = 40, 6
A0, L2 = 0.1, 0.02


def model(items: np.ndarray | None = None, a0: float = A0, l2: float = L2) -> dict[str, np.ndarray]:
    """As a broadcast has it, but in float32, of these items V."""
    if items is None:
        items = 0.5 * np.random.default_rng(7).standard_normal((ITEMS, K))
    left, lengths, _ = np.linalg.svd(items, full_matrices=False)
    # Of fewer items than columns the others are nothing.
    left = np.pad(left, ((0, 0), (0, items.shape[1] - left.shape[1])))
    lengths = np.pad(lengths, (0, items.shape[1] - len(lengths)))
    root = len(items) ** 0.5
    told = {"items": root * left, "strengths": lengths / root, "solve": np.array([a0, l2])}
    return {name: array.astype(np.float32) for name, array in told.items()}


def factors(posed: LeastSquares) -> np.ndarray:
    """V, float64."""
    return posed.items.astype(np.float64) * posed.strengths


def best(posed: LeastSquares, users: Sequence[Likes]) -> np.ndarray:
    """Users' vectors beside V: where the gradient of the loss is 0, float64."""
    items = factors(posed)
    found = np.zeros((len(users), items.shape[1]))
    for vector, one in zip(found, users, strict=True):
        if len(one.rows):
            own, weights = items[one.rows], one.weights.astype(np.float64)
            system = A0 * items.T @ items + (weights[:, None] * own).T @ own
            system += L2 * (weights.sum() + A0 * len(items)) * np.eye(items.shape[1])
            vector[:] = np.linalg.solve(system, weights @ own)
    return found


def short_of_best(posed: LeastSquares, one: Likes, found: np.ndarray) -> float:
    """What of the fall of a user's loss, from zeros to its minimum, a vector lacks, as a share."""
    items = factors(posed)

    def loss(vector: np.ndarray) -> float:
        missed = one.weights * (1 - items[one.rows] @ vector) ** 2
        norm = L2 * (one.weights.sum() + A0 * len(items)) * vector @ vector
        return float(missed.sum() + A0 * np.square(items @ vector).sum() + norm)

    least = loss(best(posed, [one])[0])
    return (loss(found.astype(np.float64)) - least) / (one.weights.sum() - least)


def problem(items: np.ndarray | None = None) -> LeastSquares:
    return LeastSquares.of(model(items))


def likes(rows: Sequence[int], weights: Sequence[float] | None = None) -> Likes:
    given_weights = np.ones(len(rows)) if weights is None else np.asarray(weights)
    return Likes(np.asarray(rows, dtype=np.int64), given_weights.astype(np.float32))


some_users = st.lists(
    st.lists(st.integers(0, ITEMS - 1), max_size=12, unique=True), min_size=1, max_size=9
)


@settings(max_examples=60, deadline=None)
@given(some_users, st.integers(0, 99))
def test_vectors_solve_the_dense_normal_equations(rows: list[list[int]], seed: int) -> None:
    """Whose products with the items, as they came, are those of V."""
    posed, rng = problem(), np.random.default_rng(seed)
    users = [likes(each, rng.choice([1.0, 0.1], len(each))) for each in rows]
    found = posed.vectors(users)
    assert found.dtype == np.float32 and found.shape == (len(rows), K)
    scores = best(posed, users) @ factors(posed).T
    np.testing.assert_allclose(found @ posed.items.T, scores, rtol=2e-4, atol=2e-5)
    for vector, one in zip(found, users, strict=True):
        assert len(one.rows) or not vector.any()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 12), st.floats(-2, 0), st.integers(0, 99))
def test_a_device_of_few_columns_is_as_good_as_at_the_minimum(
    count: int, k: int, steep: float, seed: int
) -> None:
    """However unequal the columns are, from steep to level."""
    rng, width = np.random.default_rng(seed), 12
    posed = problem(rng.standard_normal((300, width)) * np.geomspace(1, 10**steep, width))
    one = likes(rng.choice(300, count, replace=False).tolist())
    update = posed.trained([one], k)
    (found,), (expected,) = update["factor"].astype(np.float64), best(posed, [one])
    own = factors(posed)[np.sort(one.rows)]
    np.testing.assert_allclose(update["pulls"][:, 0], own @ found - 1, atol=1e-4)
    wrong = np.linalg.norm(own @ (found - expected)) / np.linalg.norm(own @ expected - 1)
    assert wrong < (1e-3 if count <= 64 or k == width else 0.03)


@pytest.mark.parametrize("size", [1e3, 1.0, 1e-3])
@pytest.mark.parametrize("left", [0.0, 1e-3, 1e-7, 1e-12, 1e-20])
def test_columns_that_are_next_to_nothing_leave_the_solution_finite(
    size: float, left: float
) -> None:
    """Of a fleet whose lists are alike all columns but one fade, in the end below float32."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        items = rng.standard_normal((ITEMS, K)) * [size, *[size * left] * (K - 1)]
        posed, one = problem(items), likes(rng.choice(ITEMS, size=12, replace=False).tolist())
        for k in range(1, K):
            assert short_of_best(posed, one, posed.trained([one], k)["factor"][0]) < 0.02


def updated(posed: LeastSquares, users: Sequence[Likes]) -> dict[str, Any]:
    return posed.trained(users, K)


def sums(
    posed: LeastSquares, users: Sequence[Likes], k: int = K
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The gradient [items, K], the Gram matrix [K, K], counts [items] and users, added densely: of
    a device of fewer columns, from what each user alone would hand in."""
    items = factors(posed)
    width = items.shape[1]
    gradient, gram = np.zeros(items.shape), np.zeros((width, width))
    counts, active = np.zeros(len(items), dtype=np.int64), 0
    for one, exact in zip(users, best(posed, users), strict=True):
        if not len(one.rows):
            continue
        vector = exact if k == K else posed.trained([one], k)["factor"][0].astype(np.float64)
        residuals = one.weights * (items[one.rows] @ vector - 1)
        gradient[one.rows] += residuals[:, None] * vector
        gram += np.outer(vector, vector)
        counts[one.rows] += 1
        active += 1
    return gradient, gram, counts, active


def require_sums(
    posed: LeastSquares,
    users: Sequence[Likes],
    update: Mapping[str, Any],
    k: int = K,
) -> None:
    gradient, gram, counts, active = sums(posed, users, k)
    rows, factor = update["rows"], update["factor"]
    assert update.keys() == LEAST_SQUARES_TENSORS
    np.testing.assert_array_equal(rows, np.flatnonzero(counts))
    np.testing.assert_array_equal(update["counts"], counts[rows])
    assert update["users"] == active and update["users"].dtype == update["k"].dtype == np.int64
    assert len(factor) <= min(active, len(gram))
    np.testing.assert_allclose(update["pulls"] @ factor, gradient[rows], rtol=1e-3, atol=2e-5)
    np.testing.assert_allclose(factor.T @ factor, gram, rtol=1e-3, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(some_users, st.sampled_from([2, K]))
def test_an_update_is_the_sum_of_what_its_users_pull(rows: list[list[int]], k: int) -> None:
    posed, users = problem(), [likes(each) for each in rows]
    update = posed.trained(users, k)
    require_sums(posed, users, update, k)
    assert update["k"] == k


@settings(max_examples=60, deadline=None)
@given(some_users, st.sampled_from([1, 2, 4, K]), st.integers(0, 99))
def test_an_update_says_its_two_sums_and_nothing_else(
    rows: list[list[int]], used: int, seed: int
) -> None:
    """The factor's rows are eigenvectors of the Gram matrix, and pulls are the gradient on them:
    neither says who they were added up from."""
    items = 0.5 * np.random.default_rng(7).standard_normal((ITEMS, K))
    items[:, :-used] = 0  # the columns that nobody trained come first
    posed, users = problem(items), [likes(each) for each in rows]
    update = updated(posed, users)
    require_sums(posed, users, update)
    gradient, gram, counts, active = sums(posed, users)
    if active > 1:
        factor = update["factor"].astype(np.float64)
        lengths = np.linalg.norm(factor, axis=1)
        apart = factor @ factor.T - np.diag(lengths**2)
        assert np.abs(apart).max(initial=0) < 1e-5
        assert len(factor) <= np.linalg.matrix_rank(gram, tol=1e-12)
        expected = gradient[counts > 0] @ factor.T / np.maximum(lengths, 1e-12) ** 2
        sharp = lengths > 1e-3 * lengths.max(initial=0)
        np.testing.assert_allclose(
            update["pulls"][:, sharp], expected[:, sharp], rtol=1e-2, atol=1e-3
        )
    mixed = [users[place] for place in np.random.default_rng(seed).permutation(len(users))]
    other = updated(posed, mixed)
    for name in ("rows", "counts", "users", "k"):
        np.testing.assert_array_equal(update[name], other[name])
    for one, two in ((update, other), (other, update)):
        np.testing.assert_allclose(
            one["pulls"] @ one["factor"], two["pulls"] @ two["factor"], rtol=1e-3, atol=1e-5
        )
        np.testing.assert_allclose(
            one["factor"].T @ one["factor"], two["factor"].T @ two["factor"], rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("codec", ["float32", "float16", "int8"])
@pytest.mark.parametrize("users", [1, 2, 30])
def test_an_update_comes_back_from_its_body(codec: str, users: int) -> None:
    posed, rng = problem(), np.random.default_rng(users)
    people = [likes(np.sort(rng.choice(ITEMS, 8, replace=False)).tolist()) for _ in range(users)]
    one = ScatterLearner(
        Fixed([each.rows for each in people]), NumpyStep(), K, np.random.default_rng(1)
    )
    sent = one.train(broadcast())
    found = decode_scatter_update(encode_scatter_update(sent, K, codec, rng), 1, ITEMS, K)
    assert found.tensors.keys() == LEAST_SQUARES_TENSORS
    gradient, gram, counts, active = sums(posed, people)
    assert found.tensors["users"] == active == users
    rows = found.tensors["rows"]
    np.testing.assert_array_equal(found.tensors["counts"], counts[rows])
    values = found.tensors["pulls"] @ found.tensors["factor"]
    scale = np.abs(gradient).max() / np.abs(gram).max()
    loose = {"float32": 1e-4, "float16": 2e-3, "int8": 0.03}[codec] * np.abs(gradient).max()
    np.testing.assert_allclose(values, gradient[rows], atol=loose)
    np.testing.assert_allclose(
        found.tensors["factor"].T @ found.tensors["factor"], gram, atol=loose / scale
    )


# The learner around it.


@dataclass
class Fixed:
    rows: list[np.ndarray] = field(default_factory=list)

    def positives(self) -> list[np.ndarray]:
        return self.rows


def broadcast(tensors: dict[str, np.ndarray] | None = None, round_id: int = 1) -> Broadcast:
    told = LeastSquaresTraining().as_scalars()
    return Broadcast(round_id, 0, model() if tensors is None else tensors, told)


def learner(
    rows: Sequence[Sequence[int]],
    columns: int = K,
    pool: PoolSettings | None = None,
    seed: int = 3,
) -> ScatterLearner:
    users = Fixed([np.asarray(each, dtype=np.int64) for each in rows])
    return ScatterLearner(users, NumpyStep(), columns, np.random.default_rng(seed), pool)


def test_odd_devices_are_well_defined() -> None:
    everything = list(range(ITEMS))
    for rows in ([], [[]], [[], []], [everything], [[5]], [[1, 2]] * 7, [everything] * 3 + [[]]):
        update = learner(rows).train(broadcast()).tensors
        users = [likes(each) for each in rows]
        require_sums(problem(), users, update)
        assert np.isfinite(update["pulls"]).all() and np.isfinite(update["factor"]).all()
    nothing = learner([[]]).train(broadcast()).tensors
    assert nothing["rows"].shape == (0,) and nothing["users"] == 0
    assert nothing["pulls"].shape == (0, 0) and nothing["factor"].shape == (0, K)
    twice = learner([[1, 2]] * 7).train(broadcast()).tensors
    assert len(twice["factor"]) == 1, "seven users of one mind have one direction"
    assert twice["counts"].tolist() == [7, 7]


def test_a_catalogue_of_one_item_and_more_columns_than_the_data_carry() -> None:
    one = model(np.full((1, K), 0.5))
    update = learner([[0], [0]]).train(broadcast(one)).tensors
    require_sums(LeastSquares.of(one), [likes([0]), likes([0])], update)
    # Three items span three of six columns: the others follow from the norm alone.
    few = model(np.random.default_rng(1).standard_normal((3, K)))
    update = learner([[0, 1], [1, 2], [0], [2]]).train(broadcast(few)).tensors
    users = [likes(each) for each in ([0, 1], [1, 2], [0], [2])]
    require_sums(LeastSquares.of(few), users, update)
    assert len(update["factor"]) <= 3
    # Items nobody trained yet, as small as float16 has none.
    for size in (0.0, 1e-30):
        flat = model(np.full((ITEMS, K), size))
        update = learner([[0, 1], [2]]).train(broadcast(flat)).tensors
        assert update["users"] == 2 and np.abs(update["pulls"] @ update["factor"]).max() < 1e-20


def test_a_device_keeps_nothing_of_its_users_between_rounds() -> None:
    rows = [[1, 5, 9, 13], [7], []]
    users, one = [likes(each) for each in rows], learner(rows, 2)
    before = {name: array.tobytes() for name, array in one.state().items()}
    for number in (1, 2):
        update = one.train(broadcast(round_id=number)).tensors
        require_sums(problem(), users, update, 2)
        assert update["k"] == 2
    assert {name: array.tobytes() for name, array in one.state().items()} == before
    assert learner(rows, 99).train(broadcast()).tensors["k"] == K
    # A model of another width is one more.
    narrow = model(0.5 * np.random.default_rng(8).standard_normal((ITEMS, K - 2)))
    update = one.train(broadcast(narrow, 4)).tensors
    require_sums(LeastSquares.of(narrow), users, update, 2)


def test_users_join_between_rounds() -> None:
    mine = Fixed([np.array([1, 5])])
    one = ScatterLearner(mine, NumpyStep(), 3, np.random.default_rng(0))
    one.train(broadcast())
    mine.rows.append(np.array([7, 8]))
    assert one.train(broadcast(round_id=2)).tensors["users"] == 2


def test_what_a_device_sends_depends_on_nothing_but_data_and_model() -> None:
    rows = [[1, 5, 9, 13], [2, 3], [], list(range(20, 40))]
    found = []
    for seed in (1, 2):
        one = learner(rows, 4, seed=seed)
        sent = [one.train(broadcast(round_id=number)).tensors for number in (1, 2)]
        found.append([{name: each[name].tobytes() for name in each} for each in sent])
    assert found[0] == found[1]


def test_pseudo_items_are_weak_likes_and_the_same_in_every_round() -> None:
    pool = PoolSettings(pseudo_per_positive=1.0, pseudo_weight=0.25)
    one = learner([[1, 5, 9], [2]], pool=pool)
    first, second = (one.train(broadcast(round_id=number)).tensors for number in (1, 2))
    kept = one.state()["pool"]
    assert len(kept) == 4 and not {1, 2, 5, 9} & set(kept.tolist())
    assert set(first["rows"].tolist()) == {1, 2, 5, 9, *kept.tolist()}
    assert first["rows"].tolist() == second["rows"].tolist()
    users = [
        likes([1, 5, 9, *kept[:3]], [1, 1, 1, 0.25, 0.25, 0.25]),
        likes([2, *kept[3:]], [1, 0.25]),
    ]
    require_sums(problem(), users, first)
    # The same pool after a restart; and without the setting, nothing is shown but what is true.
    other = learner([[1, 5, 9], [2]], pool=pool, seed=99)
    other.restore(one.state())
    np.testing.assert_array_equal(other.train(broadcast()).tensors["rows"], first["rows"])
    assert learner([[1, 5, 9], [2]]).train(broadcast()).tensors["rows"].tolist() == [1, 2, 5, 9]


def test_vectors_at_full_width_are_the_solutions_whatever_a_device_trains() -> None:
    one = learner([[1, 5], [], [7]], 2)
    np.testing.assert_array_equal(
        one.vectors(broadcast()), problem().vectors([likes([1, 5]), likes([]), likes([7])])
    )
    assert not one.personalises(broadcast())
    assert one.personalises(Broadcast(1, 0, model(), BprTraining().as_scalars()))


def spoilt(**changed: Any) -> dict[str, np.ndarray]:
    found = {**model(), **changed}
    return {name: array for name, array in found.items() if array is not None}


def strong(last: float) -> dict[str, np.ndarray]:
    return spoilt(strengths=np.append(np.ones(K - 1), last).astype(np.float32))


def solving(*numbers: float) -> dict[str, np.ndarray]:
    return spoilt(solve=np.array(numbers, np.float32))


BAD: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "no items": (spoilt(items=None), "lacks 'items'"),
    "items of whole numbers": (spoilt(items=np.ones((ITEMS, K), np.int64)), "lacks 'items'"),
    "no columns": (spoilt(items=np.ones((ITEMS, 0), np.float32)), "no columns"),
    "items in a list": (spoilt(items=np.ones(ITEMS, np.float32)), "lacks 'items'"),
    "an item of the user's is NaN": (
        spoilt(items=np.full((ITEMS, K), np.nan, np.float32)),
        "not finite",
    ),
    "no strengths": (spoilt(strengths=None), "lacks 'strengths'.*of different releases"),
    "strengths of whole numbers": (spoilt(strengths=np.ones(K, np.int64)), "lacks 'strengths'"),
    "strengths of fewer columns": (spoilt(strengths=np.ones(K - 1, np.float32)), "lacks 's"),
    "a matrix of strengths": (spoilt(strengths=np.eye(K, dtype=np.float32)), "lacks 'strengths'"),
    "a strength that is NaN": (strong(np.nan), "are no lengths"),
    "an infinite strength": (strong(np.inf), "are no lengths"),
    "a negative strength": (strong(-0.1), "are no lengths"),
    "no solve": (spoilt(solve=None), "lacks 'solve'"),
    "one number": (solving(0.1), "numbers above 0"),
    "whole numbers": (spoilt(solve=np.array([1, 1], np.int64)), "numbers above 0"),
    "an unseen weight of 0": (solving(0.0, 0.1), "two numbers above 0"),
    "a negative norm": (solving(0.1, -0.1), "two numbers above 0"),
    "a weight that is NaN": (solving(np.nan, 0.1), "two numbers above 0"),
    "an infinite weight": (solving(0.1, np.inf), "two numbers above 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_broadcast_ends_in_words_and_leaves_the_learner_as_it_was(name: str) -> None:
    tensors, words = BAD[name]
    one = learner([[1, 5], [7]], 2, PoolSettings(pseudo_per_positive=1.0))
    one.train(broadcast())
    before = {key: array.tobytes() for key, array in one.state().items()}
    with pytest.raises(LearnerError, match=words):
        one.train(broadcast(tensors, 2))
    assert {key: array.tobytes() for key, array in one.state().items()} == before


def test_a_bad_broadcast_is_everybody_s_error_and_a_bad_device_its_own() -> None:
    learners = [learner([[1, 5]]), learner([[ITEMS]]), learner([[7]])]
    found = ScatterLearner.train_many(learners, broadcast())
    assert [isinstance(one, LearnerError) for one in found] == [False, True, False]
    assert "40 items" in str(found[1])
    found = ScatterLearner.train_many(learners, broadcast(spoilt(strengths=None)))
    assert [isinstance(one, LearnerError) for one in found] == [True] * 3
    for told in ({}, {"loss": "softmax"}, {"loss": 3}):
        with pytest.raises(LearnerError, match="loss"):
            learners[0].train(Broadcast(1, 0, model(), told))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 24), st.integers(0, 99), st.floats(1e-4, 30))
def test_what_an_aggregator_broadcasts_is_never_refused(
    items: int, width: int, seed: int, size: float
) -> None:
    matrix = size * np.random.default_rng(seed).standard_normal((items, width))
    told = LeastSquaresLoss((items, width), LeastSquaresSettings())
    tensors, training = told.told(matrix.astype(np.float32))
    users = [[0], list(range(items))]
    update = learner(users, width).train(Broadcast(1, 0, tensors, training))
    assert update.tensors["users"] == 2
    rounded = {**tensors, "items": tensors["items"].astype(np.float16)}
    learner(users, width).train(Broadcast(1, 0, rounded, training))
