from __future__ import annotations

import numpy as np
import pytest

from aggregator.simulate.devices import FixedInteractions
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.contract import BprTraining
from device_sdk.methods.scatter.factor_step import FactorBatch
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.wire.arrays.exchange import Broadcast
from tests.fakes.reference_step import ReferenceStep, reference_loss

ITEMS, K = 50, 16
NO_POOL = PoolSettings(pseudo_per_positive=0.0)
STATE = {
    "users": np.zeros((1, 2), np.float32),
    "pool": np.zeros(0, np.int64),
    "deck": np.zeros(0, np.int64),
}


class Recorded(ReferenceStep):
    """Remembers the batches, to look at what was scored."""

    def __init__(self) -> None:
        self.calls: list[tuple[np.ndarray, np.ndarray, FactorBatch]] = []

    def gradients(self, users, items, batch):  # type: ignore[no-untyped-def]
        self.calls.append((users, items, batch))
        return super().gradients(users, items, batch)


def broadcast(
    training: BprTraining | None = None, *, round_id: int = 1, items: int = ITEMS
) -> Broadcast:
    matrix = np.random.default_rng(7).standard_normal((items, K), dtype=np.float32)
    chosen = training if training is not None else BprTraining()
    return Broadcast(round_id, 0, {"items": matrix}, chosen.as_scalars())


def learner(
    positives: list[list[int]],
    columns: int = 4,
    step: ReferenceStep | None = None,
    pool: PoolSettings = NO_POOL,
    seed: int = 3,
) -> ScatterLearner:
    rows = [np.asarray(user, dtype=np.int64) for user in positives]
    chosen = step if step is not None else ReferenceStep()
    rng = np.random.default_rng(seed)
    return ScatterLearner(FixedInteractions(rows), chosen, columns, rng, pool)


def test_reference_gradients_are_those_of_the_loss() -> None:
    rng = np.random.default_rng(1)
    users, items = rng.standard_normal((3, 4)), rng.standard_normal((6, 4))
    batch = FactorBatch(
        user=np.array([0, 1, 1, 2]),
        positive=np.array([0, 1, 2, 2]),
        negative=np.array([3, 3, 4, 5]),
        weight=np.array([1, 0.5, 1, 0.1], dtype=np.float32),
        offset=np.array([0, 0.3, -1, 2], dtype=np.float32),
        user_l2=0.1,
        item_l2=0.2,
    )
    found = ReferenceStep().gradients(users, items, batch)  # type: ignore[arg-type]
    step = 1e-6
    for matrix, gradient in ((users, found.users), (items, found.items)):
        for place in np.ndindex(matrix.shape):
            before = matrix[place]
            matrix[place] = before + step
            above = reference_loss(users, items, batch)
            matrix[place] = before - step
            below = reference_loss(users, items, batch)
            matrix[place] = before
            assert (above - below) / (2 * step) == pytest.approx(gradient[place], abs=1e-5)


def test_update_holds_the_touched_rows_and_the_drawn_columns() -> None:
    one = learner([[1, 5, 9], [2]])
    update = one.train(broadcast())
    rows, columns = update.tensors["rows"], update.tensors["columns"]
    assert update.round_id == 1
    assert {1, 2, 5, 9} <= set(rows)
    assert len(rows) <= 8
    assert len(columns) == 4
    assert update.tensors["values"].shape == (len(rows), 4)
    assert update.tensors["values"].dtype == np.float32
    assert np.abs(update.tensors["values"]).sum(axis=1).min() > 0
    nothing = learner([[]]).train(broadcast()).tensors
    assert (nothing["rows"].shape, nothing["values"].shape) == ((0,), (0, 4))


def test_only_drawn_columns_of_the_users_move() -> None:
    one = learner([[1, 5, 9]], columns=K // 2)
    first = one.train(broadcast()).tensors["columns"]
    before = one.users
    update = one.train(broadcast(round_id=2))
    moved = np.flatnonzero(np.abs(one.users - before).sum(axis=0))
    assert moved.tolist() == update.tensors["columns"].tolist()
    assert sorted([*first, *moved]) == list(range(K)), "none comes again before all have come"


def test_residual_scores_are_the_full_scores() -> None:
    step = Recorded()
    one = learner([[1, 5, 9], [2, 3]], step=step)
    message = broadcast()
    one.train(message)
    before = one.users
    update = one.train(message)
    small_users, small_items, batch = step.calls[-1]
    partial = np.sum(
        small_users[batch.user] * (small_items[batch.positive] - small_items[batch.negative]),
        axis=1,
    )
    rows = update.tensors["rows"]
    items = message.tensors["items"]
    full = np.sum(
        before[batch.user] * (items[rows[batch.positive]] - items[rows[batch.negative]]), axis=1
    )
    np.testing.assert_allclose(partial + batch.offset, full, rtol=1e-4, atol=1e-5)

    step.calls.clear()
    one.train(broadcast(BprTraining(scores="columns"), round_id=2))
    assert not step.calls[-1][2].offset.any()


def test_a_strong_device_descends_its_whole_loss() -> None:
    one = learner([[1, 5, 9, 13, 20]], columns=99)
    step = Recorded()
    two = learner([[1, 5, 9, 13, 20]], columns=99, step=step)
    message = broadcast()
    for learning in (one, two):
        update = learning.train(message)
        assert update.tensors["columns"].tolist() == list(range(K))
    batch = step.calls[0][2]
    rows = update.tensors["rows"]
    items = message.tensors["items"][rows]
    start = step.calls[0][0]
    small = two.users - start
    toward = start.astype(np.float64) + 1e-3 * small
    assert reference_loss(toward, items, batch) < reference_loss(start, items, batch)


def test_pseudo_items_are_shown_every_round() -> None:
    one = learner([[1, 5, 9]], pool=PoolSettings(pseudo_per_positive=2.0))
    shown = [set(one.train(broadcast(round_id=r)).tensors["rows"]) for r in range(1, 7)]
    always = set.intersection(*shown)
    pool = one.state()["pool"]
    assert len(pool) == 6
    assert {1, 5, 9} | set(pool.tolist()) <= always


@pytest.mark.parametrize(
    "state",
    [
        {},
        {**STATE, "users": np.zeros((1, 2))},
        {**STATE, "users": np.full((1, 2), np.nan, np.float32)},
        {**STATE, "pool": np.array([1, 1])},
        {**STATE, "pool": np.array([-1])},
        {**STATE, "deck": np.array([2])},
        {**STATE, "deck": np.array([0.5])},
    ],
)
def test_state_that_does_not_fit_is_refused(state: dict[str, np.ndarray]) -> None:
    with pytest.raises(LearnerError):
        learner([[1]]).restore(state)


def test_new_users_and_items_join_between_rounds() -> None:
    rows = [np.array([1, 5])]
    interactions = FixedInteractions(rows)
    rng = np.random.default_rng(0)
    one = ScatterLearner(interactions, ReferenceStep(), 99, rng, NO_POOL)
    one.train(broadcast())
    before = one.users
    interactions._positives = (rows[0], np.array([ITEMS + 1]))
    update = one.train(broadcast(round_id=2, items=ITEMS + 2))
    assert one.users.shape == (2, K)
    assert ITEMS + 1 in update.tensors["rows"]
    assert not np.array_equal(one.users[0], before[0])


def test_what_was_prepared_follows_the_data() -> None:
    # One array, changed in place: the next round must train what it holds then.
    liked = np.array([1, 5, 9], dtype=np.int64)
    one = ScatterLearner(
        FixedInteractions([liked]), ReferenceStep(), 4, np.random.default_rng(2), PoolSettings()
    )
    one.train(broadcast())
    liked[2] = 30
    shown = [set(one.train(broadcast(round_id=r)).tensors["rows"]) for r in range(2, 8)]
    pool = one.state()["pool"]
    assert set.intersection(*shown) == {1, 5, 30} | set(pool.tolist())


@pytest.mark.parametrize("columns", [1, 4, 99])
def test_a_seed_makes_rounds_repeatable_bit_for_bit(columns: int) -> None:
    positives = [[1, 5, 9, 13], [2, 3], [], list(range(20, 40))]
    twins = [learner(positives, columns, pool=PoolSettings()) for _ in range(2)]
    for round_id in range(1, 5):
        if round_id == 3:  # from the same state, the same draws give the same round
            state = twins[0].state()
            twins = [learner(positives, columns, pool=PoolSettings(), seed=77) for _ in range(2)]
            for one in twins:
                one.restore(state)
                for name, found in one.state().items():
                    assert found.tobytes() == state[name].tobytes()
        training = BprTraining(most_triples=0 if round_id < 3 else 9)
        first, second = (one.train(broadcast(training, round_id=round_id)) for one in twins)
        for name in ("columns", "rows", "values"):
            assert first.tensors[name].tobytes() == second.tensors[name].tobytes()
        assert round_id < 3 or len(first.tensors["rows"]) <= 18
    assert twins[0].users.tobytes() == twins[1].users.tobytes()


def test_no_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        learner([[1]], columns=0)


def test_recommendation_takes_all_columns_and_leaves_out_what_was_seen() -> None:
    one = learner([[1, 5, 9], [2]])
    message = broadcast()
    items = message.tensors["items"]
    with pytest.raises(LearnerError, match="first round"):
        one.recommend(items, 0, 3)
    one.train(message)
    found = one.recommend(items, 0, ITEMS)
    scores = items @ one.users[0]
    assert {row for row, _ in found} == set(range(ITEMS)) - {1, 5, 9}
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    assert all(score == pytest.approx(scores[row], rel=1e-5) for row, score in found)
    assert len(one.recommend(items.astype(np.float16), 1, 4)) == 4
