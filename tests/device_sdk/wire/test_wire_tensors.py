from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from device_sdk.wire.errors import WireError
from device_sdk.wire.tensors import Codec, TensorLimits, decode_tensors, encode_tensors

DTYPES = ("float32", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "bool")
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,5}(\.[a-z0-9_]{1,3}){0,2}", fullmatch=True)


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    if dtype.kind == "f":
        width = 16 if dtype.itemsize == 2 else 32
        elements = st.floats(-60_000, 60_000, width=width)  # type: ignore[arg-type]
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
        if array.dtype != np.float32 or codec is Codec.FLOAT32:
            np.testing.assert_array_equal(read[name], array)
        elif codec is Codec.FLOAT16:
            np.testing.assert_array_equal(read[name], array.astype(np.float16))
        elif array.size:
            step = np.abs(array).max(axis=-1, keepdims=True) / 127 * 1.01 if array.ndim else 0
            assert (np.abs(read[name] - array) <= step + 1e-28).all()


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
        (b"\x01\x00\x01A" + b"\x07\x00\x00", "bad-name"),
        (b"\x01\x00\x00" + b"\x07\x00\x00", "bad-name"),
        (b"\x02\x00" + b"\x01b\x07\x00\x00" + b"\x01a\x07\x00\x00", "bad-name"),
        (b"\x02\x00" + b"\x01a\x07\x00\x00" + b"\x01a\x07\x00\x00", "bad-name"),
    ],
)
def test_each_rule_refuses(data: bytes, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_tensors(data)
    assert caught.value.reason == reason


def test_caller_is_told_which_array_does_not_fit() -> None:
    for array, message in (
        (np.array([1.0]), "float64"),
        (np.array([np.inf], dtype=np.float32), "finite"),
        (np.zeros((1,) * 9, dtype=np.int8), "rank"),
    ):
        with pytest.raises(ValueError, match=f"'a'.*{message}"):
            encode_tensors({"a": array}, Codec.FLOAT32)
    with pytest.raises(ValueError, match="float16"):
        encode_tensors({"a": np.array([1e6], dtype=np.float32)}, Codec.FLOAT16)
    with pytest.raises(ValueError, match="Generator"):
        encode_tensors({"a": np.array([1.0], dtype=np.float32)}, Codec.INT8)
    with pytest.raises(ValueError, match="name"):
        encode_tensors({"A": np.zeros(1, dtype=np.int8)}, Codec.FLOAT32)
