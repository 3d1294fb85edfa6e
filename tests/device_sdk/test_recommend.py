"""Scores to recommendations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.recommend import top_items


@given(
    scores=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=30),
    seen=st.sets(st.integers(0, 29)),
    count=st.integers(0, 40),
)
def test_the_best_unseen_items_in_order(scores: list[float], seen: set[int], count: int) -> None:
    seen = {row for row in seen if row < len(scores)}
    found = top_items(np.array(scores, np.float32), sorted(seen), count)
    expected = sorted(
        (row for row in range(len(scores)) if row not in seen),
        key=lambda row: (-np.float32(scores[row]), row),
    )
    assert [row for row, _ in found] == expected[:count]
    assert [score for _, score in found] == [float(np.float32(scores[row])) for row, _ in found]


def test_wrong_arguments_are_refused() -> None:
    scores = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="count is -1"):
        top_items(scores, [], -1)
    with pytest.raises(ValueError, match="lies outside the 3"):
        top_items(scores, [3], 1)
    with pytest.raises(ValueError, match="lies outside the 3"):
        top_items(scores, [-1], 1)
    with pytest.raises(ValueError, match="finite scores"):
        top_items(np.array([np.nan], np.float32), [], 1)
    with pytest.raises(ValueError, match="finite scores"):
        top_items(np.zeros((2, 2), np.float32), [], 1)
