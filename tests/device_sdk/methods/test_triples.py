from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.methods.scatter.learner import deal_columns, left_out, touched_rows
from device_sdk.methods.scatter.triples import (
    PoolSettings,
    Triples,
    TripleSource,
    Unliked,
    grow_pool,
    seen_by_anyone,
)

CATALOGUE = 40
users = st.lists(
    st.lists(st.integers(0, CATALOGUE - 1), unique=True, max_size=CATALOGUE), min_size=1, max_size=4
)


def as_rows(positives: list[list[int]]) -> list[np.ndarray]:
    return [np.asarray(rows, dtype=np.int64) for rows in positives]


def drawn(
    rows: list[np.ndarray], pool: np.ndarray, settings: PoolSettings, seed: int, most: int = 0
) -> Triples:
    source = TripleSource(rows, pool, seen_by_anyone(rows, CATALOGUE), settings)
    return source.draw(most, np.random.default_rng(seed))


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

    triples = drawn(rows, pool, settings, seed)
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
        # Pseudo-items add no rows beside their own.
        borrowed = triples.negative[of_user & (triples.weight != 1)]
        assert set(borrowed) <= set(triples.negative[true])
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


@given(users, st.booleans(), st.integers(0, 99))
def test_ranks_reach_each_unliked_item_once(
    positives: list[list[int]], narrowed: bool, seed: int
) -> None:
    rows = as_rows(positives)
    candidates = None
    if narrowed:
        extra = np.random.default_rng(seed).random(CATALOGUE) < 0.3
        candidates = np.flatnonzero(seen_by_anyone(rows, CATALOGUE) | extra)
    unliked = Unliked(rows, CATALOGUE, candidates)
    among = set(range(CATALOGUE)) if candidates is None else set(candidates.tolist())

    class Ranks(np.random.Generator):
        """Asks for every rank in turn."""

        def random(self, size: int) -> np.ndarray:  # type: ignore[override]
            return (np.arange(size) + 0.5) / size

    every = Ranks(np.random.PCG64(0))
    for user, mine in enumerate(positives):
        expected = sorted(among - set(mine))
        assert unliked.counts[user] == len(expected)
        asked = np.full(len(expected), user, dtype=np.int64)
        assert unliked.draw(asked, every).tolist() == expected


def test_negatives_are_uniform_over_what_a_user_left() -> None:
    rows = as_rows([list(range(0, 30, 2)), list(range(10, 40))])
    pool = np.array([1, 3, 5, 7, 9], dtype=np.int64)
    source = TripleSource(rows, pool, seen_by_anyone(rows, CATALOGUE), PoolSettings())
    rng = np.random.default_rng(5)
    times = np.zeros((2, 2, CATALOGUE))
    for _ in range(2000):
        triples = source.draw(0, rng)
        is_true = (triples.weight == 1).astype(int)
        np.add.at(times, (is_true, triples.user, triples.negative), 1)
    for is_true in (0, 1):
        for user, mine in enumerate(rows):
            found = np.delete(times[is_true, user], mine)
            assert times[is_true, user, mine].sum() == 0
            if not found.sum():
                continue
            mean = found.mean()
            # Five standard deviations of a count.
            assert np.abs(found - mean).max() < 5 * np.sqrt(mean)


def test_nothing_is_shared_where_weights_may_hide_what_is_true() -> None:
    rows = as_rows([list(range(12))])
    pool = np.arange(12, 18, dtype=np.int64)
    for weight, shared in ((0.1, True), (0.2, True), (0.25, False), (1.0, False)):
        source = TripleSource(
            rows, pool, seen_by_anyone(rows, CATALOGUE), PoolSettings(0.5, weight)
        )
        rng = np.random.default_rng(4)
        pairs = [source.draw(0, rng).negative for _ in range(20)]
        assert all((one[12:] == one[:6]).all() for one in pairs) == shared


@given(
    users, st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.5, 3.0]), st.integers(0, 99)
)
def test_where_sizes_may_hide_no_sign_tells_a_pseudo_item(
    positives: list[list[int]], pseudo: float, negatives: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = as_rows(positives)
    settings = PoolSettings(pseudo, 1.0, negatives)
    seen = seen_by_anyone(rows, CATALOGUE)
    none = np.empty(0, dtype=np.int64)
    pool = grow_pool(none, seen, settings.pool_size(sum(map(len, rows))), rng)
    source = TripleSource(rows, pool, seen, settings)
    first, second = source.draw(0, rng), source.draw(0, rng)
    for user, mine in enumerate(positives):
        liked = [set(one.positive[one.user == user]) for one in (first, second)]
        others = set(first.negative[first.user == user]) | set(second.negative[second.user == user])
        assert liked[0] == liked[1]
        assert not liked[0] & others
        # Whoever leaves items over takes part.
        if negatives == 0 and 0 < len(mine) < CATALOGUE:
            assert set(mine) <= liked[0]


def test_items_held_out_for_a_test_are_drawn_as_negatives() -> None:
    rows = as_rows([list(range(10))])
    none = np.empty(0, dtype=np.int64)
    source = TripleSource(rows, none, seen_by_anyone(rows, 12), PoolSettings(0.0))
    rng = np.random.default_rng(0)
    found: set[int] = set()
    for _ in range(20):
        found |= set(source.draw(0, rng).negative.tolist())
    assert found == {10, 11}


@given(users, st.integers(1, 60), st.integers(0, 99))
def test_a_limit_keeps_whole_triples(positives: list[list[int]], most: int, seed: int) -> None:
    rows = as_rows(positives)
    pool = np.flatnonzero(~seen_by_anyone(rows, CATALOGUE))[:10]
    settings = PoolSettings(0.5, 0.1)
    every, some = drawn(rows, pool, settings, seed), drawn(rows, pool, settings, seed, most)
    assert len(some) == min(most, len(every))
    known = set(zip(every.user, every.positive, every.weight, strict=True))
    kept = list(zip(some.user, some.positive, some.weight, strict=True))
    assert set(kept) <= known
    assert len(set(kept)) == len(kept)
    for user, mine in enumerate(positives):
        of_user = some.user == user
        assert not set(some.negative[of_user]) & set(mine)
        true = of_user & (some.weight == 1)
        if true.any():
            assert set(some.negative[of_user]) == set(some.negative[true])


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=30))
def test_touched_rows_are_the_distinct_items(pairs: list[tuple[int, int]]) -> None:
    positive = np.array([one for one, _ in pairs], dtype=np.int64)
    negative = np.array([other for _, other in pairs], dtype=np.int64)
    rows, first, second = touched_rows(positive, negative, 20)
    assert rows.tolist() == sorted({item for pair in pairs for item in pair})
    assert rows[first].tolist() == positive.tolist()
    assert rows[second].tolist() == negative.tolist()


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
