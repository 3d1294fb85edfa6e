from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.methods.attention import ClusterSettings, assign_clusters

NEW = np.int64(-1)


def groups(sizes: list[int], spread: float = 0.1, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = 10 * np.eye(max(4, len(sizes)))[: len(sizes)]
    parts = [
        c + spread * rng.standard_normal((n, len(c))) for c, n in zip(centres, sizes, strict=True)
    ]
    return np.concatenate(parts)


def unknown(count: int) -> np.ndarray:
    return np.full(count, NEW)


def same_partition(one: np.ndarray, two: np.ndarray) -> bool:
    return bool(((one[:, None] == one) == (two[:, None] == two)).all())


def test_one_cluster_where_the_cap_allows_it() -> None:
    points = groups([4, 4])
    assert assign_clusters(points, unknown(8), 8, ClusterSettings()).tolist() == [0] * 8


def test_the_cap_picks_the_number_of_clusters_and_like_meet_like() -> None:
    truth = np.repeat([0, 1, 2], 4)
    found = assign_clusters(groups([4, 4, 4]), unknown(12), 4, ClusterSettings())
    assert same_partition(found, truth)


def test_mean_shift_finds_the_number_by_itself() -> None:
    truth = np.repeat([0, 1, 2], 6)
    settings = ClusterSettings(algorithm="mean-shift")
    points = groups([6, 6, 6])
    assert same_partition(assign_clusters(points, unknown(18), 18, settings), truth)
    capped = assign_clusters(points, unknown(18), 3, settings)
    assert np.bincount(capped).max() <= 3
    for cluster in range(capped.max() + 1):
        assert len(set(truth[capped == cluster])) == 1


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 14),
    st.integers(1, 6),
    st.integers(0, 10_000),
    st.sampled_from(["k-means", "mean-shift"]),
)
def test_no_cluster_exceeds_the_cap_and_numbers_have_no_gaps(
    count: int, most: int, seed: int, algorithm: str
) -> None:
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((count, 3))
    previous = rng.integers(-1, 4, count)
    chosen = ClusterSettings(algorithm=algorithm)  # type: ignore[arg-type]
    found = assign_clusters(points, previous, most, chosen)
    assert found.shape == (count,)
    assert np.bincount(found).min() >= 1
    assert np.bincount(found).max() <= most
    np.testing.assert_array_equal(found, assign_clusters(points, previous, most, chosen))


def test_identical_points_are_spread_evenly() -> None:
    found = assign_clusters(np.zeros((9, 3)), unknown(9), 4, ClusterSettings())
    assert np.bincount(found).max() <= 4


def test_membership_does_not_flap_when_points_tremble() -> None:
    # One blob has no natural halves: k-means alone would cut it anew each round.
    rng = np.random.default_rng(1)
    points = rng.standard_normal((12, 5))
    before = assign_clusters(points, unknown(12), 6, ClusterSettings())
    for _ in range(10):
        points = points + 0.05 * rng.standard_normal(points.shape)
        now = assign_clusters(points, before, 6, ClusterSettings())
        np.testing.assert_array_equal(now, before)


def test_clusters_follow_devices_that_really_change() -> None:
    points = groups([4, 4])
    before = assign_clusters(points, unknown(8), 5, ClusterSettings())
    points[3] = points[7]
    now = assign_clusters(points, before, 5, ClusterSettings())
    assert now[3] == before[7]
    np.testing.assert_array_equal(np.delete(now, 3), np.delete(before, 3))


def test_a_newcomer_joins_its_like_and_the_others_stay() -> None:
    points = groups([3, 4])
    before = assign_clusters(points, unknown(7), 4, ClusterSettings())
    grown = np.concatenate([points, points[:1] + 0.01])
    now = assign_clusters(grown, np.append(before, NEW), 4, ClusterSettings())
    np.testing.assert_array_equal(now[:7], before)
    assert now[7] == before[0]
