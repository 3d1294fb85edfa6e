"""Devices' sums add up to the fleet's quality, on splits that leak nothing."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.recommendation.metrics import full_ranks, quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut
from examples.datasets.movielens import draw_synthetic
from examples.fleet.data import NEGATIVES, split_ratings
from examples.fleet.evaluate import QualityTable, device_quality


def part(split: LeaveOneOut, users: list[int]) -> LeaveOneOut:
    return LeaveOneOut(
        split.items,
        tuple(split.train[user] for user in users),
        split.held_out[users],
        tuple(split.negatives[user] for user in users),
    )


def test_sums_over_devices_equal_the_whole() -> None:
    rng = np.random.default_rng(5)
    split = split_ratings(draw_synthetic(rng, users=30, items=200, per_user=20), rng)
    users = rng.standard_normal((30, 4)).astype(np.float32)
    items = rng.standard_normal((200, 4)).astype(np.float32)
    table = QualityTable()
    for number, held in enumerate((range(7), range(7, 8), range(8, 30))):
        rows = list(held)
        capacity = "phone" if number else "sensor"
        table.add(
            device_quality(f"d{number}", capacity, 4, 8, users[rows], items, part(split, rows))
        )
    whole = quality(sampled_ranks(users, items, split))
    found = table.at(4)
    assert found is not None
    assert found.users == 30
    assert found.hit_ratio == pytest.approx(whole.hit_ratio)
    assert found.ndcg == pytest.approx(whole.ndcg)
    among_all = quality(full_ranks(users, items, split))
    assert found.full_hit_ratio == pytest.approx(among_all.hit_ratio)
    assert found.full_ndcg == pytest.approx(among_all.ndcg)
    phones = table.at(4, "phone")
    assert phones is not None
    assert phones.users == 23
    assert table.at(3) is None
    assert table.at(4, "tablet") is None
    assert table.rounds(least_devices=3) == [4]
    assert table.rounds(least_devices=4) == []


def test_the_tests_negatives_were_never_touched() -> None:
    rng = np.random.default_rng(6)
    ratings = draw_synthetic(rng, users=12, items=150, per_user=15)
    split = split_ratings(ratings, rng)
    for user in range(12):
        touched = set(ratings.item[ratings.user == user].tolist())
        assert not touched & set(split.negatives[user].tolist())
        assert touched == {*split.train[user].tolist(), int(split.held_out[user])}
        assert len(np.unique(split.negatives[user])) == NEGATIVES
