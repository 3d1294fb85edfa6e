"""What mutual learning sends: public samples and soft labels, rounded and packed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from device_sdk.methods.mutual.contract import (
    SampleEntry,
    attachment_name,
    decode_samples,
    decode_soft_labels,
    encode_samples,
    encode_soft_labels,
    owner_of,
    samples_mark,
)
from device_sdk.wire.codec.errors import WireError
from tests.fakes.refusals import reason_of

ENTRIES = {"x": SampleEntry("float32", (3,)), "y": SampleEntry("int64", ())}
floats = st.floats(-1e6, 1e6, width=32)


@pytest.mark.filterwarnings("error")
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(3)), elements=floats),
    st.sampled_from(["uint8", "deflate", "float32"]),
    st.sampled_from([3, 300, 70_000]),
)
@example(np.float32([[1e-45, 0, 0]]), "uint8", 3)
def test_samples_go_round(x: np.ndarray, form: str, classes: int) -> None:
    y = np.arange(len(x), dtype=np.int64) * (classes - 1) // max(1, len(x) - 1)
    coded = encode_samples({"x": x, "y": y}, form)  # type: ignore[arg-type]
    found = decode_samples(coded, ENTRIES)
    np.testing.assert_array_equal(found["y"], y)
    assert (found["x"].dtype, found["y"].dtype) == (np.float32, np.int64)
    span = float(x.max()) - float(x.min())
    # Steps below the least normal float32 cannot travel as one: then low stands for all.
    least = float(np.finfo(np.float32).tiny)
    error = 0 if form == "float32" else span / 255 * 0.51 + 1e-6 * float(np.abs(x).max()) + least
    assert float(np.abs(found["x"] - x).max()) <= error
    assert coded["y"].dtype.itemsize == (1 if y.max() < 256 else 2 if y.max() < 65_536 else 4)


def test_images_of_8_bits_are_exact() -> None:
    image = np.array([[0, 17, 255]], np.float32) / np.float32(255)
    coded = encode_samples({"x": image}, "uint8")
    found = decode_samples(coded, {"x": ENTRIES["x"]})
    np.testing.assert_allclose(found["x"], image, atol=1e-7)


def packed(**changes: object) -> dict[str, np.ndarray]:
    coded = encode_samples({"x": np.zeros((2000, 3), np.float32)}, "deflate")
    for name, value in changes.items():
        coded[name.replace("__", ".")] = np.asarray(value)
    return coded


def test_packed_samples_are_small_and_exact() -> None:
    coded = packed()
    assert len(coded["x"]) < 100
    assert decode_samples(coded, {"x": ENTRIES["x"]}, most=2000)["x"].shape == (2000, 3)
    with pytest.raises(WireError, match="too large"):
        decode_samples(coded, {"x": ENTRIES["x"]}, most=1999)


@pytest.mark.parametrize(
    "bad",
    [
        packed(x__count=np.int32(1999)),
        packed(x__count=np.int32(2001)),
        packed(x__count=np.int32(-1)),
        packed(x__count=np.int32(2**31 - 1)),
        packed(x__count=np.float32(2000)),
        packed(x=packed()["x"][:-3]),
        packed(x=np.append(packed()["x"], np.uint8(0))),
        packed(x=np.full(50, 7, np.uint8)),
        packed(x=np.zeros((2000, 3), np.uint8)),
    ],
)
def test_packed_samples_of_another_length_are_refused(bad: dict[str, np.ndarray]) -> None:
    assert reason_of(decode_samples, bad, {"x": ENTRIES["x"]}) == "bad-public"


@given(hnp.arrays(np.uint8, st.integers(0, 60)), st.integers(-5, 2**31 - 1))
def test_any_stream_gives_samples_or_a_wire_error(stream: np.ndarray, count: int) -> None:
    coded = packed(x=stream, x__count=np.int32(count))
    try:
        decode_samples(coded, {"x": ENTRIES["x"]})
    except WireError as error:
        assert error.reason == "bad-public"


def test_a_mark_tells_samples_apart() -> None:
    one = {"x": np.zeros((2, 3), np.uint8), "y": np.zeros(2, np.uint8)}
    marks = {
        samples_mark(one),
        samples_mark({**one, "y": np.ones(2, np.uint8)}),
        samples_mark({**one, "x": np.zeros((2, 3), np.int8)}),
        samples_mark({**one, "z": one["y"]}),
    }
    assert len(marks) == 4 and samples_mark(dict(reversed(one.items()))) in marks
    sender = "0f" * 16
    assert owner_of(attachment_name(sender, samples_mark(one))) == sender
    assert owner_of("vector." + sender) is owner_of(f"public.{sender}") is None


@pytest.mark.parametrize(
    "change",
    [
        {"x": None},
        {"y": None},
        {"x.low": None},
        {"x.step": np.zeros(1, np.float32)},
        {"x.low": np.asarray(np.nan, np.float32)},
        {"x": np.zeros((2, 4), np.uint8)},
        {"x": np.zeros((2, 3), np.int64)},
        {"y": np.zeros(2, np.float32)},
        {"y": np.zeros(3, np.uint8)},
        {"z": np.zeros(2, np.uint8)},
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, np.ndarray | None]) -> None:
    good = encode_samples({"x": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.int64)}, "uint8")
    bad = {name: array for name, array in {**good, **change}.items() if array is not None}
    assert reason_of(decode_samples, bad, ENTRIES) == "bad-public"


def test_samples_that_are_not_finite_are_not_sent() -> None:
    with pytest.raises(ValueError, match="not finite"):
        encode_samples({"x": np.full((1, 3), np.inf, np.float32)}, "uint8")
    with pytest.raises(WireError, match="not finite"):
        decode_samples({"x": np.full((1, 3), np.nan, np.float32)}, {"x": ENTRIES["x"]})


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
    if form == "uint8" and top == 0:
        assert (coded["labels"].astype(int).sum(axis=1) == 255).all()
    error = 1e-3 if form == "float16" else 1 / 255 + 1e-3
    if top == 0:
        np.testing.assert_allclose(found, exact, atol=error)
    else:
        order = np.argsort(-exact, axis=1, kind="stable")[:, :top]
        kept = np.take_along_axis(exact, order, 1)
        np.testing.assert_allclose(np.take_along_axis(found, order, 1), kept, atol=2 * error)


def test_the_missing_mass_is_spread_evenly() -> None:
    exact = np.array([[0.5, 0.3, 0.1, 0.06, 0.04]], np.float32)
    found = decode_soft_labels(encode_soft_labels(exact, "float16", 2), 5, "float16", 2)
    np.testing.assert_allclose(found, [[0.5, 0.3, 0.2 / 3, 0.2 / 3, 0.2 / 3]], atol=1e-3)


@pytest.mark.parametrize("bad", [[[0.5, np.nan]], [[-0.1, 1.1]], [[0.0, 0.0]], [[np.inf, 1.0]]])
def test_what_is_no_distribution_is_not_sent(bad: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"distributions|not finite"):
        encode_soft_labels(np.array(bad, np.float32), "uint8")


@pytest.mark.parametrize("row", [[0.4, 0.4], [0.6, 0.6], [-0.5, 1.5], [np.nan, 1.0]])
def test_what_is_no_distribution_is_not_taken(row: list[float]) -> None:
    labels = np.array([[0.5, 0.5], row], np.float16)
    assert reason_of(decode_soft_labels, {"labels": labels}, 2, "float16") == "bad-labels"


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
