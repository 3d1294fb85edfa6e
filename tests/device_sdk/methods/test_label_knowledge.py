from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.teacher_logits.contract import (
    TeacherLogitsTraining,
    decode_knowledge,
    encode_knowledge,
    share_of,
)

THREE = TeacherLogitsTraining(classes=3)


def knowledge(labels: list[int], means: list[list[float]], counts: list[int]) -> LabelKnowledge:
    return LabelKnowledge(
        np.asarray(labels, dtype=np.int64),
        np.asarray(counts, dtype=np.int64),
        np.asarray(means, dtype=np.float32).reshape(len(labels), -1),
    )


TWO_LABELS = knowledge([0, 2], [[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]], [4, 9])


def test_knowledge_survives_the_wire() -> None:
    found = decode_knowledge(encode_knowledge(TWO_LABELS, THREE), THREE)
    assert found.labels.tolist() == [0, 2] and found.counts.tolist() == [4, 9]
    np.testing.assert_array_equal(found.means, TWO_LABELS.means)


def test_two_labels_take_a_few_dozen_bytes() -> None:
    arrays = encode_knowledge(TWO_LABELS, THREE)
    assert sum(array.nbytes for array in arrays.values()) == 2 * 2 + 2 * 4 + 2 * 3 * 2


def test_a_share_weighs_devices_or_samples() -> None:
    share = share_of(TWO_LABELS, THREE)
    np.testing.assert_array_equal(share.sums[[0, 2]], TWO_LABELS.means)
    assert share.weights.tolist() == [1, 0, 1] and share.devices.tolist() == [1, 0, 1]
    by_samples = TeacherLogitsTraining(classes=3, weights="samples", most_samples=5)
    share = share_of(TWO_LABELS, by_samples)
    assert share.weights.tolist() == [4, 0, 5]
    np.testing.assert_allclose(share.sums[2], 5 * TWO_LABELS.means[1])


def test_claims_outside_the_bounds_are_moved_to_them_and_stay_distributions() -> None:
    bounds = TeacherLogitsTraining(classes=3, least_confidence=0.4, most_confidence=0.9)
    claims = knowledge(
        [0, 1, 2], [[0.1, 0.6, 0.3], [0.0, 1.0, 0.0], [0.2, 0.2, 0.6]], counts=[1, 1, 1]
    )
    share = share_of(claims, bounds)
    assert share.bounded == 2
    np.testing.assert_allclose(share.sums[0], [0.4, 0.4, 0.2], atol=1e-6)
    np.testing.assert_allclose(share.sums[1], [0.05, 0.9, 0.05], atol=1e-6)
    np.testing.assert_array_equal(share.sums[2], claims.means[2])


ARRAYS = hnp.arrays(
    st.sampled_from([np.uint16, np.int32, np.int64, np.float16, np.float32, np.uint8]),
    hnp.array_shapes(min_dims=0, max_dims=2, max_side=4),
)


@given(
    st.dictionaries(
        st.sampled_from(["labels", "counts", "values", "classes", "more"]), ARRAYS, min_size=2
    ),
    st.sampled_from(["float16", "int8"]),
    st.sampled_from([0, 2]),
)
def test_any_tensors_are_knowledge_or_a_value_error(
    tensors: dict[str, NDArray[Any]], precision: Any, top: int
) -> None:
    training = TeacherLogitsTraining(classes=3, precision=precision, top_classes=top)
    try:
        found = decode_knowledge(tensors, training)
    except ValueError:
        return
    share = share_of(found, training)
    assert share.sums.shape == (3, 3) and np.isfinite(share.sums).all()


def broken(name: str, array: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {**encode_knowledge(TWO_LABELS, THREE), name: array}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (broken("more", np.zeros(1)), "expected exactly"),
        (broken("labels", np.array([0, 2], dtype=np.int64)), "'labels' are int64"),
        (broken("labels", np.array([2, 0], dtype=np.uint16)), "must increase"),
        (broken("labels", np.array([0, 3], dtype=np.uint16)), "must increase"),
        (broken("counts", np.array([4], dtype=np.int32)), "'counts' are"),
        (broken("counts", np.array([4, 0], dtype=np.int32)), "count is below 1"),
        (broken("values", np.full((2, 3), np.nan, dtype=np.float16)), "no number"),
        (broken("values", np.full((2, 3), 0.5, dtype=np.float16)), "add up to 1"),
        (broken("values", np.full((1, 3), 1 / 3, dtype=np.float16)), "expected float16"),
    ],
)
def test_what_is_wrong_is_said(tensors: dict[str, NDArray[Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode_knowledge(tensors, THREE)
