from __future__ import annotations

import math
import struct

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError

LIMIT = 1 << 20

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.binary(max_size=300)
    | st.text(max_size=80)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=30), inner, max_size=6)
    ),
    max_leaves=20,
)


def same(left: object, right: object) -> bool:
    """Equality that tells 1 from 1.0 and True, and 0.0 from -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


@given(values)
def test_round_trip_and_agreement_with_cbor2(value: cbor.CborValue) -> None:
    encoded = cbor.encode(value)
    assert same(cbor.decode(encoded, limit_bytes=LIMIT), value)
    assert cbor2.dumps(value, canonical=True) == encoded
    assert same(cbor2.loads(encoded), value)


def accepted_as_cbor2_does(data: bytes) -> bool:
    """Whether we accept ``data``; if so, cbor2 must read the same and write the same."""
    try:
        value = cbor.decode(data, limit_bytes=LIMIT)
    except WireError as error:
        assert error.reason == "bad-cbor"
        return False
    assert same(cbor2.loads(data), value)
    assert cbor2.dumps(value, canonical=True) == data
    return True


@settings(max_examples=400)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_read_as_cbor2_reads_them(data: bytes) -> None:
    accepted_as_cbor2_does(data)


@settings(max_examples=300)
@given(values, st.data())
def test_mutated_bytes_are_refused_or_canonical(value: cbor.CborValue, data: st.DataObject) -> None:
    raw = bytearray(cbor.encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    accepted_as_cbor2_does(bytes(raw))
    accepted_as_cbor2_does(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


def loose_form(value: cbor.CborValue) -> bytes:
    """A valid, non-canonical encoding: lengths one size too wide."""
    if isinstance(value, bytes):
        return b"\x5a" + struct.pack(">I", len(value)) + value
    if isinstance(value, list):
        return b"\x99" + struct.pack(">H", len(value)) + b"".join(map(loose_form, value))
    return cbor.encode(value)


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_wider_lengths_than_needed_are_refused(value: list[bytes]) -> None:
    loose = loose_form(list(value))
    assert cbor2.loads(loose) == value
    assert not accepted_as_cbor2_does(loose)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "empty"),
        (b"\x18\x17", "23 in two bytes"),
        (b"\x19\x00\xff", "255 in three bytes"),
        (b"\x1a\x00\x00\xff\xff", "65535 in five bytes"),
        (b"\x1b\x00\x00\x00\x00\xff\xff\xff\xff", "2^32 - 1 in nine bytes"),
        (b"\x5f\x41a\xff", "indefinite bytes"),
        (b"\x9f\xff", "indefinite array"),
        (b"\xbf\xff", "indefinite map"),
        (b"\xc0\x00", "tag"),
        (b"\xd8\x1c\x80", "shared reference tag"),
        (b"\xf7", "undefined"),
        (b"\xf8\x20", "simple value 32"),
        (b"\xf0", "simple value 16"),
        (b"\xf9\x7e\x00", "NaN"),
        (b"\xf9\x7c\x00", "infinity"),
        (b"\xfa\x3f\x80\x00\x00", "1.0 in single precision"),
        (b"\xfb\x3f\xf0\x00\x00\x00\x00\x00\x00", "1.0 in double precision"),
        (b"\xa2\x61a\x00\x61a\x00", "duplicate key"),
        (b"\xa2\x61b\x00\x61a\x00", "keys out of order"),
        (b"\xa1\x00\x00", "integer key"),
        (b"\x00\x00", "trailing byte"),
        (b"\x61\xff", "not UTF-8"),
        (b"\x63\xed\xa0\x80", "a surrogate in UTF-8"),
        (b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff", "huge array"),
        (b"\xbb\x7f\xff\xff\xff\xff\xff\xff\xff", "huge map"),
        (b"\x5b\x00\x00\x00\xff\xff\xff\xff\xff", "huge bytes"),
        (b"\x81" * 17 + b"\x00", "too deep"),
        (b"\x81" * 5000, "much too deep"),
        (b"\xff", "stray break"),
    ],
)
def test_each_forbidden_form_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(WireError) as refused:
        cbor.decode(data, limit_bytes=LIMIT)
    assert refused.value.reason == "bad-cbor", what


def test_the_deepest_allowed_value_and_the_size_cap() -> None:
    deep = b"\x81" * 16 + b"\x00"
    assert cbor.encode(cbor.decode(deep, limit_bytes=17)) == deep
    with pytest.raises(WireError) as refused:
        cbor.decode(deep, limit_bytes=16)
    assert refused.value.reason == "too-large"


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 2**64, -(2**64) - 1, {1: 2}, {1, 2}, bytearray(b"x"), "\ud800"]
)
def test_values_without_a_form_are_a_programming_error(value: cbor.CborValue) -> None:
    with pytest.raises(ValueError, match=r"."):
        cbor.encode(value)


def test_map_keys_are_sorted_by_their_encodings() -> None:
    assert cbor.encode({"b": 1, "aa": 3, "a": 2}) == bytes.fromhex("a361610261620162616103")
