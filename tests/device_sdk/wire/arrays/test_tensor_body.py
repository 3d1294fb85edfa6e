"""The generic body of updates: every array and scalar comes back, and bad bytes are refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from numpy.typing import NDArray

from device_sdk.wire.arrays.exchange import MAX_METADATA_BYTES, Update, decode_update, encode_update
from device_sdk.wire.arrays.tensors import Codec
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}(\.[a-z0-9_]{1,8}){0,2}", fullmatch=True)
SCALARS = (
    st.booleans() | st.integers(-(2**63), 2**63) | st.floats(-1e12, 1e12) | st.text(max_size=20)
)
DTYPES = st.sampled_from(["float32", "int64", "int32", "uint8", "bool"])


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    dtype = np.dtype(draw(DTYPES))
    shape = draw(st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    elements = st.floats(-1e9, 1e9, width=32) if dtype.kind == "f" else None
    return draw(st_numpy.arrays(dtype, shape, elements=elements))


@st.composite
def updates(draw: st.DrawFn) -> Update:
    tensors = draw(st.dictionaries(NAMES, arrays(), max_size=4))
    return Update(3, tensors, draw(st.dictionaries(NAMES, SCALARS, max_size=4)))


@given(updates())
def test_everything_comes_back_exactly_in_float32(update: Update) -> None:
    body = encode_update(update, Codec.FLOAT32)
    got = decode_update(body, 3, "ab" * 16)
    assert (got.round_id, got.sender) == (3, "ab" * 16)
    assert dict(got.metadata) == dict(update.metadata)
    assert {type(value) for value in got.metadata.values()} == {
        type(value) for value in update.metadata.values()
    }
    assert got.tensors.keys() == update.tensors.keys()
    for name, array in update.tensors.items():
        assert got.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(got.tensors[name], array)
    assert encode_update(got, Codec.FLOAT32) == body


@pytest.mark.parametrize(
    ("codec", "step"), [(Codec.FLOAT16, 2e-3), (Codec.INT8, 0.05), (Codec.INT4, 0.5)]
)
def test_short_codecs_keep_floats_closely_and_integers_exactly(codec: Codec, step: float) -> None:
    values = np.random.default_rng(1).standard_normal((20, 8), dtype=np.float32)
    counts = np.arange(4, dtype=np.int64)
    update = Update(1, {"weight": values, "counts": counts}, {"samples": 7})
    body = encode_update(update, codec, np.random.default_rng(2))
    got = decode_update(body, 1)
    np.testing.assert_allclose(got.tensors["weight"], values, atol=step)
    np.testing.assert_array_equal(got.tensors["counts"], counts)
    assert len(body) < 0.75 * len(encode_update(update, Codec.FLOAT32))


@given(updates(), st.data())
def test_damaged_bodies_are_refused_or_read(update: Update, data: st.DataObject) -> None:
    body = bytearray(encode_update(update, Codec.FLOAT32))
    with pytest.raises(WireError):
        decode_update(bytes(body) + b"\x00", 3)
    with pytest.raises(WireError):
        decode_update(bytes(body[: data.draw(st.integers(0, len(body) - 1))]), 3)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        decode_update(bytes(body), 3)


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_read(raw: bytes) -> None:
    with suppress(WireError):
        decode_update(raw, 1)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (cbor.encode([1]), "bad-field"),
        (cbor.encode({"a": b"bytes"}), "bad-field"),
        (cbor.encode({"A": 1}), "bad-field"),
        (cbor.encode({"a": [1]}), "bad-field"),
        (b"\xa1\x61a\x18\x01", "bad-cbor"),  # 1 in two bytes
        (b"", "bad-cbor"),
    ],
)
def test_metadata_must_be_a_canonical_map_of_scalars(metadata: bytes, reason: str) -> None:
    body = b"\x01" + len(metadata).to_bytes(2, "little") + metadata + b"\x00\x00"
    with pytest.raises(WireError, match=reason):
        decode_update(body, 1)


def test_other_formats_and_too_much_metadata_are_refused() -> None:
    with pytest.raises(WireError, match="bad-format"):
        decode_update(b"\x02\x01\x00\xa0\x00\x00", 1)
    with pytest.raises(ValueError, match="metadata take"):
        encode_update(Update(1, {}, {"text": "x" * MAX_METADATA_BYTES}), Codec.FLOAT32)
