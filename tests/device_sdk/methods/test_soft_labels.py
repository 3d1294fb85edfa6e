from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from device_sdk.methods.mutual.contract import decode_soft_labels, encode_soft_labels
from device_sdk.wire.codec.errors import WireError

shapes = st.tuples(st.integers(1, 6), st.integers(2, 12))
raw_labels = shapes.flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=st.floats(0.0009765625, 1.0, width=32))
)


@given(raw_labels, st.sampled_from(["float16", "uint8"]), st.integers(0, 4))
def test_labels_go_round_to_their_precision(raw: np.ndarray, form: str, top: int) -> None:
    exact = raw / raw.sum(axis=1, keepdims=True)
    classes = raw.shape[1]
    top = min(top, classes - 1)
    coded = encode_soft_labels(exact, form, top)  # type: ignore[arg-type]
    found = decode_soft_labels(coded, classes, form, top)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    error = 1e-3 if form == "float16" else 1 / 255 + 1e-3
    if top == 0:
        np.testing.assert_allclose(found, exact, atol=error)
    else:
        order = np.argsort(-exact, axis=1, kind="stable")[:, :top]
        kept = np.take_along_axis(exact, order, 1)
        np.testing.assert_allclose(np.take_along_axis(found, order, 1), kept, atol=2 * error)


@given(raw_labels)
def test_codes_of_8_bits_sum_to_255(raw: np.ndarray) -> None:
    codes = encode_soft_labels(raw, "uint8")["labels"]
    assert (codes.astype(int).sum(axis=1) == 255).all()


def test_the_missing_mass_is_spread_evenly() -> None:
    exact = np.array([[0.5, 0.3, 0.1, 0.06, 0.04]], np.float32)
    found = decode_soft_labels(encode_soft_labels(exact, "float16", 2), 5, "float16", 2)
    np.testing.assert_allclose(found, [[0.5, 0.3, 0.2 / 3, 0.2 / 3, 0.2 / 3]], atol=1e-3)


@pytest.mark.parametrize("bad", [[[0.5, np.nan]], [[-0.1, 1.1]], [[0.0, 0.0]], [[np.inf, 1.0]]])
def test_what_is_no_distribution_is_not_sent(bad: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"distributions|not finite"):
        encode_soft_labels(np.array(bad, np.float32), "uint8")


@given(
    hnp.arrays(
        st.sampled_from([np.float16, np.uint8, np.float32]),
        st.sampled_from([(3, 4), (3, 2), (0, 4), (4,)]),
    ),
    hnp.arrays(st.sampled_from([np.uint8, np.int64]), st.sampled_from([(3, 2), (3, 4)])),
    st.sampled_from([0, 2]),
    st.sampled_from(["float16", "uint8"]),
)
def test_any_arrays_give_distributions_or_wire_errors(
    labels: np.ndarray, classes: np.ndarray, top: int, form: str
) -> None:
    tensors = {"labels": labels, "classes": classes} if top else {"labels": labels}
    try:
        found = decode_soft_labels(tensors, 4, form, top)  # type: ignore[arg-type]
    except WireError as error:
        assert error.reason == "bad-labels"
        return
    assert found.shape == (len(labels), 4)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-4)
