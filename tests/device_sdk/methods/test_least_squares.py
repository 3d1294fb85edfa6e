"""What a device solves and hands in under least squares, against the dense formulas in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.methods.least_squares import LeastSquaresLoss, LeastSquaresSettings
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
ALL = np.arange(K)


def model(items: np.ndarray | None = None, a0: float = A0, l2: float = L2) -> dict[str, np.ndarray]:
    """As a broadcast has it, but in float32."""
    if items is None:
        items = 0.5 * np.random.default_rng(7).standard_normal((ITEMS, K))
    items = items.astype(np.float32)
    wide = items.astype(np.float64)
    gram = wide.T @ wide / len(items)
    told = {"items": items, "gram": gram, "solve": np.array([a0, l2])}
    return {name: array.astype(np.float32) for name, array in told.items()}


def problem(items: np.ndarray | None = None) -> LeastSquares:
    return LeastSquares.of(model(items))


def likes(rows: Sequence[int], weights: Sequence[float] | None = None) -> Likes:
    given_weights = np.ones(len(rows)) if weights is None else np.asarray(weights)
    return Likes(np.asarray(rows, dtype=np.int64), given_weights.astype(np.float32))


def loss(u: np.ndarray, one: Likes, items: np.ndarray) -> float:
    """The module's formula, word for word."""
    scores = items.astype(np.float64) @ u
    own = one.weights * (1 - scores[one.rows]) ** 2
    norm = one.weights.sum(dtype=np.float64) + A0 * len(items)
    return float(own.sum() + A0 * (scores**2).sum() + L2 * norm * (u @ u))


some_users = st.lists(
    st.lists(st.integers(0, ITEMS - 1), max_size=12, unique=True), min_size=1, max_size=9
)
some_columns = st.lists(st.integers(0, K - 1), min_size=1, max_size=K, unique=True).map(
    lambda drawn: np.array(sorted(drawn))
)


@settings(max_examples=60, deadline=None)
@given(some_users, some_columns)
def test_vectors_solve_the_dense_normal_equations(
    rows: list[list[int]], columns: np.ndarray
) -> None:
    posed = problem()
    found = posed.vectors([likes(each) for each in rows], columns)
    assert found.dtype == np.float32 and found.shape == (len(rows), len(columns))
    items = posed.items.astype(np.float64)[:, columns]
    for vector, own in zip(found, rows, strict=True):
        if not own:
            assert not vector.any()
            continue
        system = A0 * items.T @ items + items[own].T @ items[own]
        system += L2 * (len(own) + A0 * ITEMS) * np.eye(len(columns))
        expected = np.linalg.solve(system, items[own].sum(axis=0))
        np.testing.assert_allclose(vector, expected, rtol=2e-4, atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, ITEMS - 1), min_size=1, max_size=ITEMS, unique=True),
    st.integers(0, 99),
)
def test_a_user_s_vector_is_where_its_loss_is_least(rows: list[int], seed: int) -> None:
    posed = problem()
    weights = np.random.default_rng(seed).choice([1.0, 0.1], len(rows))
    one = likes(rows, weights)
    (vector,) = posed.vectors([one]).astype(np.float64)
    step = 1e-4
    scale = max(1.0, loss(np.zeros(K), one, posed.items))
    for place in range(K):
        ahead = np.zeros(K)
        ahead[place] = step
        slope = loss(vector + ahead, one, posed.items) - loss(vector - ahead, one, posed.items)
        assert abs(slope / (2 * step)) < 2e-4 * scale
    least = loss(vector, one, posed.items)
    for _ in range(20):
        other = vector + 0.1 * np.random.default_rng(seed).standard_normal(K)
        assert loss(other, one, posed.items) > least


def sums(
    posed: LeastSquares, users: Sequence[Likes], columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The gradient [items, k], the Gram matrix [k, k], counts [items] and users, added densely."""
    items = posed.items.astype(np.float64)[:, columns]
    gradient, gram = np.zeros(items.shape), np.zeros((len(columns), len(columns)))
    counts, active = np.zeros(len(items), dtype=np.int64), 0
    for one in users:
        if not len(one.rows):
            continue
        (vector,) = posed.vectors([one], columns).astype(np.float64)
        residuals = one.weights * (items[one.rows] @ vector - 1)
        gradient[one.rows] += residuals[:, None] * vector
        gram += np.outer(vector, vector)
        counts[one.rows] += 1
        active += 1
    return gradient, gram, counts, active


def require_sums(
    posed: LeastSquares, users: Sequence[Likes], columns: np.ndarray, update: dict[str, Any]
) -> None:
    gradient, gram, counts, active = sums(posed, users, columns)
    rows, factor = update["rows"], update["factor"]
    assert update.keys() == LEAST_SQUARES_TENSORS
    np.testing.assert_array_equal(rows, np.flatnonzero(counts))
    np.testing.assert_array_equal(update["counts"], counts[rows])
    np.testing.assert_array_equal(update["columns"], columns)
    assert update["users"] == active and update["users"].dtype == np.int64
    assert len(factor) <= min(active, len(columns))
    np.testing.assert_allclose(update["pulls"] @ factor, gradient[rows], rtol=1e-3, atol=2e-5)
    np.testing.assert_allclose(factor.T @ factor, gram, rtol=1e-3, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(some_users, some_columns)
def test_an_update_is_the_sum_of_what_its_users_pull(
    rows: list[list[int]], columns: np.ndarray
) -> None:
    posed, users = problem(), [likes(each) for each in rows]
    update = posed.update(users, columns)
    require_sums(posed, users, columns, update)
    if sum(map(bool, rows)) == 1:
        assert len(update["factor"]) == 1
        (vector,) = posed.vectors([one for one in users if len(one.rows)], columns)
        np.testing.assert_array_equal(update["factor"][0], vector)


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
    update = posed.update(users, ALL)
    require_sums(posed, users, ALL, update)
    gradient, gram, counts, active = sums(posed, users, ALL)
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
    other = posed.update(mixed, ALL)
    for name in ("columns", "rows", "counts", "users"):
        np.testing.assert_array_equal(update[name], other[name])
    for one, two in ((update, other), (other, update)):
        np.testing.assert_allclose(
            one["pulls"] @ one["factor"], two["pulls"] @ two["factor"], rtol=1e-3, atol=1e-5
        )
        np.testing.assert_allclose(
            one["factor"].T @ one["factor"], two["factor"].T @ two["factor"], rtol=1e-3, atol=1e-5
        )


def test_no_user_s_vector_stands_alone_where_the_first_column_is_untrained() -> None:
    items = 0.5 * np.random.default_rng(7).standard_normal((ITEMS, K))
    items[:, 0] = 0
    posed = problem(items)
    users = [likes([1, 2, 3]), likes([3, 20]), likes([7, 8])]
    update = posed.update(users, ALL)
    for vector in posed.vectors(users):
        along = update["factor"] @ vector / np.linalg.norm(vector)
        assert np.abs(along).max() < 0.999 * np.linalg.norm(update["factor"], axis=1).max()
        for row in update["factor"]:
            cosine = abs(row @ vector) / np.linalg.norm(row) / np.linalg.norm(vector)
            assert cosine < 0.999


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
    gradient, gram, counts, active = sums(posed, people, ALL)
    assert found.tensors["users"] == active == users
    rows = found.tensors["rows"]
    np.testing.assert_array_equal(found.tensors["counts"], counts[rows])
    values = found.tensors["pulls"] @ found.tensors["factor"]
    loose = {"float32": 1e-4, "float16": 2e-3, "int8": 0.02}[codec] * np.abs(gradient).max()
    np.testing.assert_allclose(values, gradient[rows], atol=loose)
    np.testing.assert_allclose(
        found.tensors["factor"].T @ found.tensors["factor"], gram, atol=2e-3 * np.abs(gram).max()
    )


# The learner around it.


@dataclass
class Fixed:
    rows: list[np.ndarray] = field(default_factory=list)

    def positives(self) -> list[np.ndarray]:
        return self.rows


def broadcast(
    tensors: dict[str, np.ndarray] | None = None,
    assignment: str = "nested",
    round_id: int = 1,
) -> Broadcast:
    told = LeastSquaresTraining(assignment)  # type: ignore[arg-type]
    return Broadcast(round_id, 0, model() if tensors is None else tensors, told.as_scalars())


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
        require_sums(problem(), users, ALL, dict(update))
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
    require_sums(LeastSquares.of(one), [likes([0]), likes([0])], ALL, dict(update))
    # Three items span three of six columns: the others follow from the norm alone.
    few = model(np.random.default_rng(1).standard_normal((3, K)))
    update = learner([[0, 1], [1, 2], [0], [2]]).train(broadcast(few)).tensors
    users = [likes(each) for each in ([0, 1], [1, 2], [0], [2])]
    require_sums(LeastSquares.of(few), users, ALL, dict(update))
    assert len(update["factor"]) <= 3
    # Items nobody trained yet, as small as float16 has none.
    for size in (0.0, 1e-30):
        flat = model(np.full((ITEMS, K), size))
        update = learner([[0, 1], [2]]).train(broadcast(flat)).tensors
        assert update["users"] == 2 and np.abs(update["pulls"] @ update["factor"]).max() < 1e-20


def test_devices_of_fewer_columns_train_the_first_ones_or_are_dealt_others() -> None:
    nested = learner([[1, 5], [7]], 2)
    dealt = learner([[1, 5], [7]], 2)
    hands = []
    for number in range(1, 4):
        update = nested.train(broadcast(round_id=number)).tensors
        assert update["columns"].tolist() == [0, 1]
        update = dealt.train(broadcast(None, "dealt", number)).tensors
        columns = update["columns"]
        require_sums(problem(), [likes([1, 5]), likes([7])], columns, dict(update))
        hands += columns.tolist()
    assert sorted(hands) == list(range(K)), "no column twice before all came once"
    assert learner([[1]], 99).train(broadcast()).tensors["columns"].tolist() == list(range(K))
    assert learner([[1]], 99).train(broadcast(None, "dealt")).tensors["columns"].tolist() == list(
        range(K)
    )


def test_what_a_device_sends_depends_on_nothing_but_data_and_model() -> None:
    rows = [[1, 5, 9, 13], [2, 3], [], list(range(20, 40))]
    found = []
    for seed in (1, 2):
        one = learner(rows, 4, seed=seed)
        before = one.train(broadcast()).tensors
        again = one.train(broadcast(round_id=2)).tensors
        for name in before:
            assert before[name].tobytes() == again[name].tobytes(), "no round leaves anything"
        found.append({name: array.tobytes() for name, array in before.items()})
        assert one.users.shape == (0, K)
        state = one.state()
        one.restore(state)
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
    require_sums(problem(), users, ALL, dict(first))
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


def gram_with(value: float, place: tuple[int, int] = (0, 0)) -> np.ndarray:
    gram = model()["gram"].copy()
    gram[place] = value
    return gram


BAD: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "no items": (spoilt(items=None), "lacks 'items'"),
    "items of whole numbers": (spoilt(items=np.ones((ITEMS, K), np.int64)), "lacks 'items'"),
    "no columns": (spoilt(items=np.ones((ITEMS, 0), np.float32)), "no columns"),
    "items in a list": (spoilt(items=np.ones(ITEMS, np.float32)), "lacks 'items'"),
    "an item of the user's is NaN": (
        spoilt(items=np.full((ITEMS, K), np.nan, np.float32)),
        "not finite",
    ),
    "no gram": (spoilt(gram=None), "lacks 'gram'"),
    "a gram of whole numbers": (spoilt(gram=np.eye(K, dtype=np.int64)), "lacks 'gram'"),
    "a narrow gram": (spoilt(gram=np.eye(K - 1, dtype=np.float32)), "lacks 'gram'"),
    "a flat gram": (spoilt(gram=np.ones(K * K, np.float32)), "lacks 'gram'"),
    "a gram that is NaN": (spoilt(gram=gram_with(np.nan)), "no Gram matrix"),
    "an infinite gram": (spoilt(gram=gram_with(np.inf)), "no Gram matrix"),
    "infinite beside the diagonal": (spoilt(gram=gram_with(-np.inf, (2, 1))), "no Gram matrix"),
    "a lopsided gram": (spoilt(gram=gram_with(0.2, (0, 1))), "no Gram matrix"),
    "a negative gram": (spoilt(gram=-model()["gram"]), "no Gram matrix"),
    "a gram of one negative square": (spoilt(gram=gram_with(-0.2)), "no Gram matrix"),
    "a gram of products without squares": (
        spoilt(gram=np.ones((K, K), np.float32) - np.eye(K, dtype=np.float32)),
        "no Gram matrix",
    ),
    "no solve": (spoilt(solve=None), "lacks 'solve'"),
    "one number": (spoilt(solve=np.array([0.1], np.float32)), "numbers above 0"),
    "whole numbers": (spoilt(solve=np.array([1, 1], np.int64)), "numbers above 0"),
    "an unseen weight of 0": (
        spoilt(solve=np.array([0.0, 0.1], np.float32)),
        "two numbers above 0",
    ),
    "a negative norm": (spoilt(solve=np.array([0.1, -0.1], np.float32)), "numbers above 0"),
    "a weight that is NaN": (
        spoilt(solve=np.array([np.nan, 0.1], np.float32)),
        "two numbers above 0",
    ),
    "an infinite weight": (
        spoilt(solve=np.array([0.1, np.inf], np.float32)),
        "two numbers above 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_broadcast_ends_in_words_and_leaves_the_learner_as_it_was(name: str) -> None:
    tensors, words = BAD[name]
    for assignment in ("nested", "dealt"):
        one = learner([[1, 5], [7]], 2, PoolSettings(pseudo_per_positive=1.0))
        one.train(broadcast(None, assignment))
        before = {key: array.tobytes() for key, array in one.state().items()}
        with pytest.raises(LearnerError, match=words):
            one.train(broadcast(tensors, assignment, 2))
        assert {key: array.tobytes() for key, array in one.state().items()} == before


def test_a_bad_broadcast_is_everybody_s_error_and_a_bad_device_its_own() -> None:
    learners = [learner([[1, 5]]), learner([[ITEMS]]), learner([[7]])]
    found = ScatterLearner.train_many(learners, broadcast())
    assert [isinstance(one, LearnerError) for one in found] == [False, True, False]
    assert "40 items" in str(found[1])
    found = ScatterLearner.train_many(learners, broadcast(spoilt(gram=None)))
    assert [isinstance(one, LearnerError) for one in found] == [True] * 3
    unknown = Broadcast(1, 0, model(), {"loss": "least-squares"})
    with pytest.raises(LearnerError, match="assignment"):
        learners[0].train(unknown)
    for told in ({}, {"loss": "softmax"}, {"loss": 3}):
        with pytest.raises(LearnerError, match="loss"):
            learners[0].train(Broadcast(1, 0, model(), told))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 24), st.integers(0, 99), st.floats(1e-4, 30))
def test_what_an_aggregator_broadcasts_is_never_refused(
    items: int, width: int, seed: int, size: float
) -> None:
    """Its Gram matrix is of float16: not quite positive, where items are few."""
    matrix = size * np.random.default_rng(seed).standard_normal((items, width))
    told = LeastSquaresLoss((items, width), LeastSquaresSettings())
    tensors, training = told.told(matrix.astype(np.float32))
    users = [[0], list(range(items))]
    update = learner(users, width).train(Broadcast(1, 0, tensors, training))
    assert update.tensors["users"] == 2
    rounded = {**tensors, "items": tensors["items"].astype(np.float16)}
    learner(users, width).train(Broadcast(1, 0, rounded, training))
