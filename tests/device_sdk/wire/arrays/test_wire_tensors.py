from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from device_sdk.wire.arrays.tensors import (
    Codec,
    TensorLimits,
    decode_tensors,
    encode_tensors,
    singles,
)
from device_sdk.wire.codec.errors import WireError
from tests.fakes.refusals import reason_of

DTYPES = ("float32", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "bool")
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,5}(\.[a-z0-9_]{1,3}){0,2}", fullmatch=True)


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    if dtype.kind == "f":
        most = (
            60_000.0
            if dtype.itemsize == 2
            else draw(st.sampled_from([2.0**-20, 1.0, 60_000.0, 2.0**39]))
        )
        elements = st.floats(-most, most, width=8 * dtype.itemsize)  # type: ignore[arg-type]
        return draw(hnp.arrays(dtype, shape, elements=elements))
    return draw(hnp.arrays(dtype, shape))


TENSORS = st.dictionaries(NAMES, arrays(), max_size=4)


@given(TENSORS, st.sampled_from(Codec))
def test_round_trip(tensors: dict[str, NDArray[Any]], codec: Codec) -> None:
    read = decode_tensors(encode_tensors(tensors, codec, np.random.default_rng(0)))
    assert sorted(read) == sorted(tensors)
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype
        assert read[name].shape == array.shape
        assert read[name].flags.writeable
        if array.dtype != np.float32 or codec is Codec.FLOAT32 or array.ndim == 0:
            np.testing.assert_array_equal(read[name], array)
        elif codec is Codec.FLOAT16 and array.size:
            largest = np.abs(array.astype(float)).max()
            error = np.abs(read[name].astype(float) - array)
            assert (error <= 2.0**-11 * np.abs(array) + 2.0**-8 * min(largest, 2.0**-17)).all()
        elif array.size:
            most = 127 if codec is Codec.INT8 else 7
            step = np.abs(array).max(axis=-1, keepdims=True) / most * 1.01
            assert (np.abs(read[name] - array) <= step + 1e-28).all()


@pytest.mark.parametrize(
    ("values", "forms"),
    [
        ([1.0, -0.5, 0.25, 1e-9], {Codec.FLOAT16: 33, Codec.INT8: 32, Codec.INT4: 34}),
        ([0.0] * 4, {Codec.FLOAT16: 33, Codec.INT8: 32, Codec.INT4: 34}),
        ([65_504.0, 0, 0, 0], {Codec.FLOAT16: 33, Codec.INT8: 32, Codec.INT4: 34}),
        ([101_325.0, 9e4, 9e4, 0], {Codec.FLOAT16: 1, Codec.INT8: 32, Codec.INT4: 34}),
        ([6e4, 0.3, 0.2, 0.1], {Codec.FLOAT16: 33, Codec.INT8: 33, Codec.INT4: 33}),
        ([101_325.0, 0.3, 0.2, 0.1], {Codec.FLOAT16: 1, Codec.INT8: 1, Codec.INT4: 1}),
        ([1e12, 1e12, 1e12, 1e12], {Codec.FLOAT16: 1, Codec.INT8: 32, Codec.INT4: 34}),
        ([1e-6, 1e-6, 1e-6, 1e-6], {Codec.FLOAT16: 1, Codec.INT8: 32, Codec.INT4: 34}),
    ],
)
def test_what_a_codec_does_not_hold_travels_wider(
    values: list[float], forms: dict[Codec, int]
) -> None:
    array = np.array([values], dtype=np.float32)
    for codec, form in forms.items():
        data = encode_tensors({"a": array}, codec, np.random.default_rng(0))
        assert (codec, data[4]) == (codec, form)
        read = decode_tensors(data)["a"]
        np.testing.assert_allclose(read, array, rtol=0.01, atol=float(np.abs(array).max()) / 7)
        exact = encode_tensors({"a": array}, codec, np.random.default_rng(0), exact={"a"})
        np.testing.assert_array_equal(decode_tensors(exact)["a"], array)


@given(
    hnp.arrays(np.int8, hnp.array_shapes(min_dims=2, max_dims=2), elements=st.integers(-7, 7)),
    st.integers(-40, 30),
)
def test_four_bits_of_each_code_travel(codes: NDArray[np.int8], exponent: int) -> None:
    codes[:, 0] = 7  # so that the scale of each row is a power of two, and nothing is rounded
    array = codes * np.float32(2.0**exponent)
    data = encode_tensors({"a": array}, Codec.INT4, np.random.default_rng(0))
    rows, columns = codes.shape
    assert len(data) == 2 + 2 + 2 + 8 + rows * (2 + (columns + 1) // 2)
    np.testing.assert_array_equal(decode_tensors(data)["a"], array)


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_rounding_is_right_on_average(codec: Codec) -> None:
    row = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    rows = np.tile(row, (4000, 1))
    read = decode_tensors(encode_tensors({"a": rows}, codec, np.random.default_rng(2)))["a"]
    step = np.abs(row).max() / (127 if codec is Codec.INT8 else 7)
    # A rounding error is at most a step, with a deviation of half a step at most.
    assert np.abs(read.mean(axis=0) - row).max() < 5 * 0.5 * step / np.sqrt(len(rows))
    assert len(np.unique(read[:, 1])) == 2


def test_four_bits_are_a_quarter_of_float16() -> None:
    items = {"items": np.random.default_rng(1).standard_normal((3706, 64)).astype(np.float32)}
    rng = np.random.default_rng(2)
    sizes = {codec: len(encode_tensors(items, codec, rng)) for codec in Codec}
    assert sizes[Codec.INT4] == 18 + 3706 * (2 + 32)
    assert sizes[Codec.INT4] < 0.27 * sizes[Codec.FLOAT16]


@given(TENSORS, st.sampled_from(Codec), st.data())
def test_mutated_bytes_are_refused_or_valid(
    tensors: dict[str, NDArray[Any]], codec: Codec, data: st.DataObject
) -> None:
    mutated = bytearray(encode_tensors(tensors, codec, np.random.default_rng(0)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        mutated[at] = data.draw(st.integers(0, 255))
    require_sound(bytes(mutated[: data.draw(st.integers(0, len(mutated)))]))
    require_sound(bytes(mutated))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_valid(data: bytes) -> None:
    require_sound(data)


def require_sound(data: bytes) -> None:
    try:
        read = decode_tensors(data, limits=TensorLimits(most_bytes=4096))
    except WireError:
        return
    assert sum(array.nbytes for array in read.values()) <= 4096
    for array in read.values():
        assert array.dtype.kind != "f" or np.isfinite(array).all()


def one(form: int, shape: tuple[int, ...], payload: bytes) -> bytes:
    head = struct.pack(f"<HB1sBB{len(shape)}I", 1, 1, b"a", form, len(shape), *shape)
    return head + payload


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"\x00", "truncated"),
        (b"\x00\x00!", "bad-length"),
        (b"\xff\xff", "too-large"),
        (one(0, (), b""), "bad-format"),
        (one(10, (1,), b""), "bad-format"),
        (one(1, (1,) * 9, bytes(4)), "bad-shape"),
        (one(32, (), b""), "bad-shape"),
        (one(1, (2,), bytes(7)), "truncated"),
        (one(1, (2,), bytes(9)), "bad-length"),
        (one(1, (2**32 - 1,) * 8, b""), "too-large"),
        (one(1, (0, 2**32 - 1, 2**32 - 1), b""), "bad-shape"),
        (one(32, (2**31, 0), b""), "bad-shape"),
        (one(1, (1,), b"\x00\x00\xc0\x7f"), "bad-values"),
        (one(2, (1,), b"\x00\x7c"), "bad-values"),
        (one(33, (1,), b"\x01\xfc"), "bad-values"),
        (one(9, (2,), b"\x01\x02"), "bad-values"),
        (one(32, (1, 1), b"\x80\x3f\x80"), "bad-values"),
        (one(34, (), b""), "bad-shape"),
        (one(34, (1, 3), b"\x80\x3f\x11"), "truncated"),
        (one(34, (1, 3), b"\x80\x3f\x11\x01\x00"), "bad-length"),
        (one(34, (1, 2), b"\x80\x3f\x18"), "bad-values"),  # code -8 in the lower half
        (one(34, (1, 2), b"\x80\x3f\x81"), "bad-values"),  # and in the upper
        (one(34, (2, 1), b"\x80\x3f\x80\x3f\x11\x01"), "bad-values"),  # behind the first row
        (one(34, (1, 1), b"\x80\x3f\x81"), "bad-values"),
        (one(34, (1, 2), b"\x00\x00\x10"), "bad-values"),  # a code beside scale 0
        (one(34, (1, 2), b"\x00\x80\x00"), "bad-values"),  # minus zero
        (one(34, (1, 2), b"\x80\xbf\x11"), "bad-values"),
        (one(34, (1, 2), b"\xc0\x7f\x11"), "bad-values"),
        (one(34, (1, 2), b"\x80\x53\x11"), "bad-values"),  # a scale of 1.1e12
        (one(34, (2**31, 0), b""), "bad-shape"),
        (b"\x01\x00\x01A" + b"\x07\x00\x00", "bad-name"),
        (b"\x01\x00\x00" + b"\x07\x00\x00", "bad-name"),
        (b"\x02\x00" + b"\x01b\x07\x00\x00" + b"\x01a\x07\x00\x00", "bad-name"),
        (b"\x02\x00" + b"\x01a\x07\x00\x00" + b"\x01a\x07\x00\x00", "bad-name"),
    ],
)
def test_each_rule_refuses(data: bytes, reason: str) -> None:
    assert reason_of(decode_tensors, data) == reason


def test_caller_is_told_which_array_does_not_fit() -> None:
    for array, message in (
        (np.array([1.0]), "float64"),
        (np.array([np.inf], dtype=np.float32), "finite"),
        (np.zeros((1,) * 9, dtype=np.int8), "rank"),
    ):
        with pytest.raises(ValueError, match=f"'a'.*{message}"):
            encode_tensors({"a": array}, Codec.FLOAT32)
    for codec in (Codec.INT8, Codec.INT4):
        with pytest.raises(ValueError, match=f"{codec.name}.*Generator"):
            encode_tensors({"a": np.array([1.0], dtype=np.float32)}, codec)
    with pytest.raises(ValueError, match="name"):
        encode_tensors({"A": np.zeros(1, dtype=np.int8)}, Codec.FLOAT32)


@pytest.mark.parametrize(
    ("codec", "total"),
    [(Codec.FLOAT16, 474_386), (Codec.INT8, 244_614), (Codec.INT4, 126_022)],
)
def test_what_a_broadcast_of_a_matrix_takes(codec: Codec, total: int) -> None:
    """Of ML-1M's items at K = 64, as docs/methods/scatter.md says."""
    matrix = np.random.default_rng(0).standard_normal((3706, 64), dtype=np.float32)
    assert len(encode_tensors({"items": matrix}, codec, np.random.default_rng(1))) == total


@pytest.mark.parametrize("shape", [(256, 256), (2, 256, 128)])
def test_every_half_is_the_same_number_as_a_single(shape: tuple[int, ...]) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(shape)
    finite = np.where(np.isfinite(every), every, np.float16(0))
    for values in (every, finite, finite.T, finite[::2], finite[:0]):
        found, expected = singles(values), values.astype(np.float32)
        assert found.tobytes() == expected.tobytes() and found.shape == values.shape
    one = np.ones(3, np.float32)
    again = singles(one)
    again[:] = 2
    assert one.tolist() == [1, 1, 1] and singles(np.ones(2)).dtype == np.float32
