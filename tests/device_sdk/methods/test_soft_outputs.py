from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from device_sdk.methods.teacher_logits.contract import (
    Precision,
    SoftForm,
    decode_soft_outputs,
    encode_soft_outputs,
)

PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "int8")


def distributions(rows: int, classes: int, seed: int, sharpness: float) -> NDArray[np.float32]:
    logits = sharpness * np.random.default_rng(seed).standard_normal((rows, classes))
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (exponentials / exponentials.sum(axis=1, keepdims=True)).astype(np.float32)


@given(
    rows=st.integers(0, 6),
    classes=st.integers(2, 40) | st.just(300),
    top=st.integers(0, 45),
    precision=st.sampled_from(PRECISIONS),
    seed=st.integers(0, 2**20),
    sharpness=st.sampled_from([0.0, 1.0, 5.0, 60.0]),
)
def test_what_is_kept_comes_back_rounded_and_rows_stay_distributions(
    rows: int, classes: int, top: int, precision: Precision, seed: int, sharpness: float
) -> None:
    form = SoftForm(precision, top)
    sent = distributions(rows, classes, seed, sharpness)
    arrays = encode_soft_outputs(sent, form)
    assert set(arrays) == set(form.names(classes))
    if set(arrays) == {"values"} and precision == "int8":
        assert arrays["values"].sum(axis=1, dtype=int).tolist() == [255] * rows
    found = decode_soft_outputs(arrays, rows, classes, form)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    assert (found >= 0).all()
    kept = arrays["classes"].astype(int) if "classes" in arrays else None
    if kept is None:
        kept = np.tile(np.arange(classes), (rows, 1))
    step = {"float32": 1e-6, "float16": 2e-3, "int8": 1 / 255 + 1e-6}[precision]
    np.testing.assert_allclose(
        np.take_along_axis(found, kept, axis=1), np.take_along_axis(sent, kept, axis=1), atol=step
    )
    # The classes that were left out are no more probable than those that were kept.
    for row in range(rows):
        left = np.delete(sent[row], kept[row])
        assert not len(left) or left.max() <= sent[row][kept[row]].min()


@given(
    values=hnp.arrays(
        st.sampled_from([np.float32, np.float16, np.uint8, np.int8, np.float64]),
        hnp.array_shapes(min_dims=0, max_dims=3, max_side=4),
    ),
    chosen=hnp.arrays(
        st.sampled_from([np.uint16, np.int64]), hnp.array_shapes(min_dims=1, max_dims=2, max_side=4)
    ),
    precision=st.sampled_from(PRECISIONS),
    top=st.integers(0, 4),
)
def test_any_arrays_give_distributions_or_a_value_error(
    values: NDArray[Any], chosen: NDArray[Any], precision: Precision, top: int
) -> None:
    try:
        found = decode_soft_outputs(
            {"values": values, "classes": chosen}, 2, 3, SoftForm(precision, top)
        )
    except ValueError:
        return
    assert found.shape == (2, 3) and found.dtype == np.float32
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    "rows",
    [
        np.array([[0.5, 0.6]], dtype=np.float32),
        np.array([[1.5, -0.5]], dtype=np.float32),
        np.array([[np.nan, 1.0]], dtype=np.float32),
        np.array([[0.5, 0.5]]),
        np.ones((2, 1), dtype=np.float32),
    ],
)
def test_what_is_no_distribution_is_not_sent(rows: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|distribution"):
        encode_soft_outputs(rows, SoftForm())


@pytest.mark.parametrize(("precision", "top"), [("fp16", 0), ("int8", -1), ("int8", True)])
def test_unknown_forms_are_refused(precision: Any, top: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        SoftForm(precision, top)
