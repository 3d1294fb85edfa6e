from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.learners.columns import deal_columns, left_out
from device_sdk.learners.pool import PoolSettings, grow_pool
from device_sdk.learners.triples import draw_triples, seen_by_anyone

CATALOGUE = 40
users = st.lists(
    st.lists(st.integers(0, CATALOGUE - 1), unique=True, max_size=CATALOGUE), min_size=1, max_size=4
)


def as_rows(positives: list[list[int]]) -> list[np.ndarray]:
    return [np.asarray(rows, dtype=np.int64) for rows in positives]


@given(users, st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.0, 3.0]), st.integers(0, 99))
def test_triples_are_true_orders(
    positives: list[list[int]], pseudo: float, negatives: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = as_rows(positives)
    settings = PoolSettings(pseudo, 0.1, negatives)
    seen = seen_by_anyone(rows, CATALOGUE)
    none = np.empty(0, dtype=np.int64)
    pool = grow_pool(none, seen, settings.pool_size(sum(map(len, rows))), rng)
    assert len(np.unique(pool)) == len(pool)
    assert not seen[pool].any()

    triples = draw_triples(rows, pool, seen, settings, rng)
    shown = set(pool) | {row for user in positives for row in user}
    for user, mine in enumerate(positives):
        of_user = triples.user == user
        true = of_user & (triples.weight == 1)
        has_negatives = bool(set(range(CATALOGUE) if negatives == 0 else shown) - set(mine))
        # One triple for each interaction, in the order given.
        assert triples.positive[true].tolist() == (mine if has_negatives else [])
        assert not set(triples.negative[of_user]) & set(mine)
        extra = triples.positive[of_user & (triples.weight != 1)]
        assert set(extra) <= set(pool)
        assert len(extra) <= settings.pseudo_items(len(mine))
    if negatives:
        assert set(triples.negative) <= shown


@given(users, st.integers(0, 99))
def test_a_pool_only_grows_at_its_end(positives: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = as_rows(positives)
    none = np.empty(0, dtype=np.int64)
    first = grow_pool(none, seen_by_anyone(rows[:1], CATALOGUE), 5, rng)
    second = grow_pool(first, seen_by_anyone(rows, CATALOGUE), 12, rng)
    assert second[: len(first)].tolist() == first.tolist()
    assert len(np.unique(second)) == len(second)


def test_items_held_out_for_a_test_are_drawn_as_negatives() -> None:
    rng = np.random.default_rng(0)
    rows = as_rows([list(range(10))])
    seen = seen_by_anyone(rows, 12)
    drawn: set[int] = set()
    for _ in range(20):
        none = np.empty(0, dtype=np.int64)
        drawn |= set(draw_triples(rows, none, seen, PoolSettings(0.0), rng).negative.tolist())
    assert drawn == {10, 11}


def test_sample_keeps_whole_triples() -> None:
    rng = np.random.default_rng(0)
    rows = as_rows([[0, 1, 2, 3], [4, 5]])
    seen = seen_by_anyone(rows, CATALOGUE)
    triples = draw_triples(rows, np.empty(0, dtype=np.int64), seen, PoolSettings(0.0), rng)
    some = triples.sample(3, rng)
    assert len(some) == 3
    whole = set(zip(triples.user, triples.positive, triples.negative, strict=True))
    assert set(zip(some.user, some.positive, some.negative, strict=True)) <= whole
    assert triples.sample(0, rng) is triples


@given(st.integers(1, 20), st.integers(1, 22), st.integers(0, 99))
def test_columns_are_dealt_distinct_and_equally_often(total: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    deck = np.empty(0, dtype=np.int64)
    times = np.zeros(total, dtype=np.int64)
    for _ in range(12):
        columns, deck = deal_columns(deck, total, count, rng)
        assert len(columns) == min(total, count)
        assert (np.diff(columns) > 0).all()
        assert sorted([*columns, *left_out(total, columns)]) == list(range(total))
        times[columns] += 1
    if total % count == 0:
        assert times.max() - times.min() <= 1
    else:
        # A deal that spans two decks leaves its first part out of the second.
        assert times.min() >= 12 * min(count, total) // (2 * total)
