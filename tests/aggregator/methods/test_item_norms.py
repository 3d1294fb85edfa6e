"""Long vectors that their items' touches do not explain are shortened; others stay as they are."""

from __future__ import annotations

import numpy as np
import pytest

from aggregator.methods.scatter import ItemNorms, ScatterMethod, ScatterSettings
from device_sdk.wire.arrays.exchange import Update

ITEMS, K = 200, 4


def touched(multiple: float = 2.0) -> ItemNorms:
    """Item i is touched i times."""
    found = ItemNorms(multiple, ITEMS)
    for least in range(1, ITEMS):
        found.note(np.arange(least, ITEMS))
    return found


def popular_is_long() -> np.ndarray:
    """Item i has a vector of length 1 + i / 50."""
    matrix = np.zeros((ITEMS, K), dtype=np.float32)
    matrix[np.arange(ITEMS), np.arange(ITEMS) % K] = 1 + np.arange(ITEMS) / 50
    return matrix


def test_vectors_that_touches_explain_stay_bit_for_bit() -> None:
    one, matrix = touched(), popular_is_long()
    assert one.bounded(matrix).tobytes() == matrix.tobytes()
    assert one.count == 0


def test_the_vector_of_a_promoted_item_is_held_to_those_touched_as_often() -> None:
    one, matrix = touched(), popular_is_long()
    promoted = matrix.copy()
    promoted[40] *= 4 / np.linalg.norm(promoted[40])
    found = one.bounded(promoted)
    assert one.count == 1
    # Three groups of 66 or 67: item 40 is among the items 1 to 67.
    usual = np.median(np.linalg.norm(promoted[1:68], axis=1))
    assert np.linalg.norm(found[40]) == pytest.approx(2 * usual, rel=1e-3)
    np.testing.assert_allclose(found[40] / np.linalg.norm(found[40]), promoted[40] / 4, rtol=1e-5)
    others = np.arange(ITEMS) != 40
    assert found[others].tobytes() == promoted[others].tobytes()
    assert 4 < np.linalg.norm(matrix[190]) < 5, "items touched often may be as long as that"


def test_what_nobody_touched_is_neither_measured_nor_moved() -> None:
    one = ItemNorms(2.0, ITEMS)
    matrix = popular_is_long()
    assert one.bounded(matrix).tobytes() == matrix.tobytes()
    one.note(np.arange(100, ITEMS))
    matrix[3] = 1e6
    assert one.bounded(matrix).tobytes() == matrix.tobytes()


def test_where_most_vectors_are_zero_there_is_no_scale() -> None:
    one, matrix = touched(), np.zeros((ITEMS, K), dtype=np.float32)
    matrix[7] = 1.0
    assert one.bounded(matrix).tobytes() == matrix.tobytes()


def update(round_id: int, seed: int) -> Update:
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(ITEMS, size=60, replace=False))
    values = rng.standard_normal((60, K)).astype(np.float32)
    return Update(round_id, {"rows": rows, "columns": np.arange(K), "values": values})


def method() -> ScatterMethod:
    first = np.random.default_rng(0).standard_normal((ITEMS, K)).astype(np.float32)
    return ScatterMethod(first, ScatterSettings("bpr", item_multiple=1.5))


def test_a_method_bounds_its_items_and_continues_bit_for_bit_as_the_catalogue_grows() -> None:
    one, other = method(), method()
    one.open_round(1)
    for seed in range(10):
        one.absorb(update(1, seed))
    assert one.close_round().metrics["bounded_items"] > 0
    norms = np.linalg.norm(one.items, axis=1)
    assert norms.max() < 1.6 * np.median(norms), "groups' medians are alike in random vectors"
    one.grow(np.ones((3, K), dtype=np.float32))
    one.open_round(2)
    one.absorb(update(2, 20))
    other.restore(one.state())
    for each in (one, other):
        each.absorb(update(2, 21))
    assert one.close_round() == other.close_round()
    states = [{n: a.tobytes() for n, a in each.state().items()} for each in (one, other)]
    assert states[0] == states[1]
    assert one.state()["touches.settled"].sum() == 60 * 12
