"""What attention tells its devices: its ladder, sketches, and a fleet that fits its receiver."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.artifact.flat_layout import FlatLadder, flat_layout
from device_sdk.methods.attention.contract import (
    AttentionTraining,
    ladder_from_text,
    ladder_to_text,
    sketches,
)
from device_sdk.methods.attention.fleet import read_fleet
from device_sdk.methods.learner import LearnerError
from device_sdk.wire.arrays.exchange import Broadcast


def test_a_ladder_survives_a_broadcast() -> None:
    layouts = (
        flat_layout({"gru.weight_hh_l0": (6, 2), "head.bias": (5,)}),
        flat_layout({"gru.weight_hh_l0": (12, 4), "head.bias": (5,)}),
    )
    ladder = FlatLadder(layouts, {"gru.weight_hh_l0": (3, 1)})
    assert ladder_from_text(ladder_to_text(ladder)) == ladder


def _with(blocks: object) -> dict[str, object]:
    return {"rungs": [{"a": [4]}], "blocks": blocks}


@given(
    st.one_of(
        st.none(),
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=5), inner, max_size=3)
            ),
        )
        .flatmap(lambda one: st.sampled_from([one, {"rungs": one, "blocks": {}}, _with(one)]))
        .map(json.dumps),
    )
)
def test_a_bad_ladder_raises_value_error_and_nothing_else(text: object) -> None:
    try:
        found = ladder_from_text(text)
    except ValueError:
        return
    assert all(layout.size > 0 for layout in found.layouts)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"rungs":[],"blocks":{}}',
        '{"rungs":[[]],"blocks":{}}',
        '{"rungs":[{"a":[0]}],"blocks":{}}',
        '{"rungs":[{"a":[1.5]}],"blocks":{}}',
        '{"rungs":[{"a":[4]}],"blocks":{"a":[0]}}',
        '{"rungs":[{"a":[4]}],"blocks":{"a":2}}',
        '{"rungs":[{"a":[4]}],"blocks":[]}',
        '{"rungs":[{"a":[4]}]}',
        "[" * 5000,
    ],
)
def test_a_ladder_of_the_wrong_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ladder|shape|sizes"):
        ladder_from_text(text)


def test_a_layout_of_a_million_millions_is_refused_before_memory_is_taken_for_it() -> None:
    own = flat_layout({"a.weight": (2, 2)})
    widest = flat_layout({"a.weight": (2**20, 2**20)})
    settings = {
        **AttentionTraining().as_scalars(),
        "ladder": ladder_to_text(FlatLadder((own, widest))),
    }
    broadcast = Broadcast(1, 0, {"global": np.ones(4, np.float32)}, settings)
    with pytest.raises(LearnerError, match=r"'global' of the broadcast is \(4,\)"):
        read_fleet(broadcast, own)


LAYOUT = flat_layout({"a.weight": (50, 100), "b.bias": (7,), "b.weight": (300,)})


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, LAYOUT.size)).astype(np.float32)


def test_known_signs() -> None:
    layout = flat_layout({"w": (3,)})
    found = sketches(np.eye(3, dtype=np.float32), layout, seed=7, rows=8) * np.sqrt(8)
    # A byte of SHAKE-256 for each column, its highest bit first.
    stream = hashlib.shake_256(b"tessera sketch 7  0").digest(3)
    expected = [[1 if byte & 0x80 >> bit else -1 for bit in range(8)] for byte in stream]
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6)


def test_lengths_and_angles_are_nearly_kept() -> None:
    pair = vectors(2)
    pair[1] = 0.6 * pair[0] + 0.8 * pair[1]
    found = sketches(pair, LAYOUT, seed=1, rows=1024)
    for group, (start, end) in enumerate(LAYOUT.spans):
        part = pair[:, start:end]
        true, sketched = part @ part.T, found[:, group] @ found[:, group].T
        np.testing.assert_allclose(sketched, true, atol=0.15 * true.max())


def test_a_sketch_of_a_sum_is_the_sum_of_sketches() -> None:
    one, two = vectors(1, 1), vectors(1, 2)
    np.testing.assert_allclose(
        sketches(one + two, LAYOUT, 3),
        sketches(one, LAYOUT, 3) + sketches(two, LAYOUT, 3),
        atol=1e-3,
    )


def test_seeds_and_groups_have_signs_of_their_own() -> None:
    whole = np.ones((1, LAYOUT.size), dtype=np.float32)
    found = sketches(whole, LAYOUT, 3)
    assert not np.allclose(found, sketches(whole, LAYOUT, 4))
    assert found.shape == (1, 2, 64)


def test_no_vectors_have_no_sketches() -> None:
    assert sketches(np.empty((0, LAYOUT.size), np.float32), LAYOUT, 0).shape == (0, 2, 64)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="expected \\[n, 5307\\]"):
        sketches(np.zeros((1, 3), np.float32), LAYOUT, 0)
    with pytest.raises(ValueError, match="multiple of 8"):
        sketches(vectors(1), LAYOUT, 0, rows=12)
    with pytest.raises(ValueError, match="seed"):
        sketches(vectors(1), LAYOUT, -1)
