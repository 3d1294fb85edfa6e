from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.artifact.flat_layout import flat_layout
from device_sdk.methods.attention.contract import (
    AttentionTraining,
    layouts_from_text,
    layouts_to_text,
)


def test_settings_survive_a_broadcast() -> None:
    told = AttentionTraining(layers="first", neighbours=4, personal=True, proximal=0.5)
    assert AttentionTraining.from_scalars({**told.as_scalars(), "other": 1}) == told


def test_missing_settings_are_named() -> None:
    values = AttentionTraining().as_scalars()
    del values["folds"]
    with pytest.raises(ValueError, match="lacks the training settings folds"):
        AttentionTraining.from_scalars(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("warm_up_rounds", -1),
        ("base_steps", 0),
        ("batch_size", 1.5),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("meta_learning_rate", -0.1),
        ("proximal", float("inf")),
        ("own_weight", -1.0),
        ("layers", "third"),
        ("neighbours", True),
        ("folds", 1),
        ("meta_every", 0),
        ("sketch_rows", 12),
        ("sketch_seed", 2**63),
        ("mix", 1),
        ("keeps", "head"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(name: str, value: object) -> None:
    assert name in {field.name for field in fields(AttentionTraining)}
    with pytest.raises(ValueError, match=name):
        replace(AttentionTraining(), **{name: value})  # type: ignore[arg-type]


def test_the_own_network_takes_part_in_one_way_only() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        AttentionTraining(include_self=True, own_weight=1.0)


def test_personal_needs_a_pull() -> None:
    with pytest.raises(ValueError, match="proximal pull"):
        AttentionTraining(personal=True)


def test_layouts_survive_a_broadcast() -> None:
    layouts = (
        flat_layout({"gru.weight_hh_l0": (6, 2), "head.bias": (5,)}),
        flat_layout({"gru.weight_hh_l0": (12, 4), "head.bias": (5,)}),
    )
    assert layouts_from_text(layouts_to_text(layouts)) == layouts


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
        ).map(json.dumps),
    )
)
def test_bad_layouts_raise_value_error_and_nothing_else(text: object) -> None:
    try:
        found = layouts_from_text(text)
    except ValueError:
        return
    assert all(layout.size > 0 for layout in found)


@pytest.mark.parametrize("text", ["[]", "[[]]", '[{"a":[0]}]', '[{"a":[1.5]}]', "[" * 5000])
def test_layouts_of_the_wrong_kind_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"layout|shape"):
        layouts_from_text(text)
