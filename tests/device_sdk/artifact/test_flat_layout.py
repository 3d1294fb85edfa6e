from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.artifact.flat_layout import FlatEntry, FlatLadder, FlatLayout, flat_layout

GRU = ("gru.weight_ih_l0", "gru.weight_hh_l0", "gru.bias_ih_l0", "gru.bias_hh_l0")


def gru(hidden: int, features: int = 3) -> dict[str, tuple[int, ...]]:
    return {
        "head.weight": (5, hidden),
        "head.bias": (5,),
        "gru.weight_ih_l0": (3 * hidden, features),
        "gru.weight_hh_l0": (3 * hidden, hidden),
        "gru.bias_ih_l0": (3 * hidden,),
        "gru.bias_hh_l0": (3 * hidden,),
    }


shapes = st.dictionaries(
    st.sampled_from(["a.weight", "a.bias", "b.c.weight", "b.c.bias", "b.d", "z"]),
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    min_size=1,
)


@given(shapes, st.integers(0, 2**31))
def test_vectors_and_parameters_are_the_same_numbers(
    sizes: dict[str, tuple[int, ...]], seed: int
) -> None:
    layout = flat_layout(sizes)
    rng = np.random.default_rng(seed)
    parameters = {n: np.asarray(rng.standard_normal(s), np.float32) for n, s in sizes.items()}
    vector = layout.flatten(parameters)
    assert vector.shape == (layout.size,)
    back = layout.unflatten(vector)
    assert set(back) == set(parameters)
    for name, array in parameters.items():
        np.testing.assert_array_equal(back[name], array)


@given(shapes)
def test_groups_lie_together_whatever_the_order_of_the_names(
    sizes: dict[str, tuple[int, ...]],
) -> None:
    layout = flat_layout(sizes)
    assert layout == flat_layout(dict(reversed(sizes.items())))
    starts = [start for start, _ in layout.spans]
    ends = [end for _, end in layout.spans]
    assert starts[0] == 0
    assert starts[1:] == ends[:-1]
    assert ends[-1] == layout.size


def gru_ladder(*hidden: int) -> FlatLadder:
    """Its gates lie below one another, three of them."""
    blocks = {name: (3, 1) if "weight" in name else (3,) for name in GRU}
    return FlatLadder(tuple(flat_layout(gru(each)) for each in hidden), blocks)


def test_a_narrow_gru_lies_in_the_first_rows_of_each_gate() -> None:
    ladder = gru_ladder(2, 4)
    narrow, wide = ladder.layouts
    numbers = {n: np.arange(np.prod(s), dtype=np.float32).reshape(s) for n, s in gru(4).items()}
    inner = narrow.unflatten(wide.flatten(numbers)[ladder.places(narrow)])
    for gate in range(3):
        rows, outer = slice(2 * gate, 2 * gate + 2), slice(4 * gate, 4 * gate + 2)
        np.testing.assert_array_equal(
            inner["gru.weight_hh_l0"][rows], numbers["gru.weight_hh_l0"][outer, :2]
        )
        np.testing.assert_array_equal(
            inner["gru.weight_ih_l0"][rows], numbers["gru.weight_ih_l0"][outer]
        )
        np.testing.assert_array_equal(
            inner["gru.bias_ih_l0"][rows], numbers["gru.bias_ih_l0"][outer]
        )
    np.testing.assert_array_equal(inner["head.weight"], numbers["head.weight"][:, :2])


@given(st.lists(st.integers(1, 6), min_size=3, max_size=3, unique=True).map(sorted))
def test_places_of_a_rung_lead_through_every_larger_one(sizes: list[int]) -> None:
    ladder = gru_ladder(*sizes)
    small, middle, full = ladder.layouts
    np.testing.assert_array_equal(ladder.places(full), np.arange(full.size))
    through = ladder.places(middle)[ladder.places(small, middle)]
    np.testing.assert_array_equal(through, ladder.places(small))


def test_what_does_not_nest_is_refused_by_name() -> None:
    ladder = gru_ladder(4, 2)
    with pytest.raises(ValueError, match="does not lie in"):
        ladder.places(ladder.layouts[0])
    with pytest.raises(ValueError, match="same parameters"):
        FlatLadder((flat_layout({"b": (1,)}),)).places(flat_layout({"a": (1,)}))


def test_wrong_parts_are_refused() -> None:
    layout = flat_layout({"a.weight": (2, 2)})
    with pytest.raises(ValueError, match="expected \\(2, 2\\)"):
        layout.flatten({"a.weight": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match="holds 4 numbers"):
        layout.unflatten(np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="positive"):
        FlatEntry("a", (0,))
    with pytest.raises(ValueError, match="needs parameters"):
        FlatLayout(())
    with pytest.raises(ValueError, match="flat_layout"):
        FlatLayout((FlatEntry("b", (1,)), FlatEntry("a", (1,))))
