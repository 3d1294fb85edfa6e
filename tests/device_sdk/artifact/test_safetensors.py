"""Our safetensors against the reference implementation, and against hostile bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from device_sdk.artifact import ArtifactError
from device_sdk.artifact.parts import DTYPES
from device_sdk.artifact.safetensors import Array, decode, encode

arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=8), arrays, max_size=4
).filter(lambda found: "__metadata__" not in found)
SAMPLE = encode(
    {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, bool)}, {"k": "v"}
)


def same(left: Array, right: Array) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )


@given(tensors, st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
def test_round_trip(found: dict[str, Array], metadata: dict[str, str]) -> None:
    decoded = decode(encode(found, metadata))
    assert decoded.metadata == metadata
    assert set(decoded.tensors) == set(found)
    assert all(same(decoded.tensors[name], array) for name, array in found.items())


@given(tensors)
def test_agrees_with_the_reference_implementation(found: dict[str, Array]) -> None:
    theirs = safetensors.numpy.load(encode(found))
    assert set(theirs) == set(found)
    assert all(same(theirs[name], array) for name, array in found.items())
    ours = decode(safetensors.numpy.save(found)).tensors
    assert all(same(ours[name], array) for name, array in found.items())


def test_arrays_are_read_only_and_strided_ones_are_stored_in_order() -> None:
    array = np.arange(12, dtype=np.int64).reshape(3, 4)
    decoded = decode(encode({"t": array.T[::2]})).tensors["t"]
    assert np.array_equal(decoded, array.T[::2])
    with pytest.raises(ValueError, match="read-only"):
        decoded[...] = 0
    with pytest.raises(ArtifactError, match="complex64 cannot be stored"):
        encode({"c": np.zeros(1, np.complex64)})


def file(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "before the header"),
        (b"\xff" * 16, "inside the header"),
        (SAMPLE[:-1], "do not match"),
        (SAMPLE + b"x", "do not fill"),
        (file([], b""), "expected an object"),
        (file({"a": entry([2], 0, 2), "b": entry([2], 1, 3)}, b"abc"), "overlaps"),
        (file({"a": entry([1], 1, 2)}, b"ab"), "gap"),
        (file({"a": entry([3], 0, 2)}, b"ab"), "do not match"),
        (file({"a": entry([2], 2, 0)}, b"ab"), "do not match"),
        (file({"a": entry([-1], 0, 1)}, b"a"), "is -1; expected an integer from 0"),
        (file({"a": entry([2**62, 2**62], 0, 1)}, b"a"), "too many"),
        (file({"a": entry([1] * 40, 0, 1)}, b"a"), "at most 16 items"),
        (file({"a": entry([1], 0, 1, "F8_E4M3")}, b"a"), "expected one of F64"),
        (file({"a": entry([1], 0, 1, "BOOL")}, b"\x02"), "neither true nor false"),
        (file({"a": {**entry([1], 0, 1), "x": 1}}, b"a"), "a map with x"),
        (file({"__metadata__": {"a": 1}}, b""), "metadata"),
    ],
)
def test_malformed_files(data: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        decode(data)


@given(st.integers(0, len(SAMPLE) - 1), st.binary(max_size=6), st.integers(0, 6))
def test_only_artifact_errors_escape(at: int, noise: bytes, drop: int) -> None:
    for data in (SAMPLE[:at] + noise + SAMPLE[at + drop :], noise):
        try:
            decode(data)
        except ArtifactError:
            continue
