from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.arrays.factored import (
    MOST_USERS,
    FactoredRows,
    decode_factored,
    decode_factored_each,
    encode_factored,
    is_factored,
)
from device_sdk.wire.arrays.sparse import SparseRows, ValueFormat, encode_number, encode_sparse
from device_sdk.wire.codec.errors import WireError
from tests.fakes.refusals import mutated, reason_of


def drawn(
    seed: int, items: int, width: int, rows: int, users: int, height: int, k: int = 1
) -> FactoredRows:
    rng = np.random.default_rng(seed)
    return FactoredRows(
        np.sort(rng.choice(items, rows, replace=False)).astype(np.int64),
        (rng.standard_normal((rows, height)) * 10.0 ** rng.integers(-8, 4)).astype(np.float32),
        rng.standard_normal((height, width)).astype(np.float32),
        rng.integers(1, users + 1, rows) if rows else np.empty(0, dtype=np.int64),
        users,
        k,
        width,
    )


@st.composite
def updates(draw: st.DrawFn) -> tuple[FactoredRows, int]:
    """Of one user, of a few, and of more than there are columns: f is K then, or less."""
    items = draw(st.integers(1, 5000))
    width = draw(st.integers(1, 130))
    users = draw(st.sampled_from([0, 1, 1, 2, 3, width, 200, MOST_USERS]))
    rows = draw(st.integers(0, min(items, 40))) if users else 0
    height = draw(st.sampled_from([min(users, width), 0, min(1, users)]))
    seed = draw(st.integers(0, 2**32))
    return drawn(seed, items, width, rows, users, height, draw(st.integers(1, width))), items


def encoded(update: FactoredRows, value_format: ValueFormat) -> bytes:
    return encode_factored(update, value_format, np.random.default_rng(0))


@given(updates(), st.sampled_from(ValueFormat))
def test_round_trip(given_update: tuple[FactoredRows, int], value_format: ValueFormat) -> None:
    update, items = given_update
    data = encoded(update, value_format)
    assert is_factored(data)
    read = decode_factored(data, items=items, width=update.width)
    assert (read.users, read.k, read.width) == (update.users, update.k, update.width)
    for name in ("rows", "counts"):
        found = getattr(read, name)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, getattr(update, name))
    for name in ("pulls", "factor"):
        found, sent = getattr(read, name), getattr(update, name)
        assert (found.dtype, found.shape) == (np.float32, sent.shape)
    if value_format is ValueFormat.FLOAT32:
        np.testing.assert_array_equal(read.pulls, update.pulls)
        np.testing.assert_array_equal(read.factor, update.factor)
        return
    # A scale for each row of the factor: its users' pulls are of a size.
    for found, sent in ((read.pulls.T, update.pulls.T), (read.factor, update.factor)):
        if value_format is ValueFormat.FLOAT16:
            np.testing.assert_allclose(found, sent, rtol=2.0**-11, atol=2.0**-25)
        else:
            step = np.abs(sent).max(axis=1, initial=0) / 127 * 1.0079
            assert (np.abs(found - sent) <= step[:, None] * 1.0001).all()


@given(updates(), st.sampled_from(ValueFormat), st.data())
def test_mutated_bytes_are_refused_or_valid(
    given_update: tuple[FactoredRows, int], value_format: ValueFormat, data: st.DataObject
) -> None:
    update, items = given_update
    require_sound(mutated(encoded(update, value_format), data), items, update.width)


@given(
    st.sampled_from([b"", b"\x11", b"\x12", b"\x13"]),
    st.binary(max_size=300),
    st.integers(1, 100_000),
    st.integers(1, 80),
)
def test_any_bytes_are_refused_or_valid(head: bytes, data: bytes, items: int, width: int) -> None:
    require_sound(head + data, items, width)
    if head:
        require_sound(head + width.to_bytes(2, "little") + data, items, width)


@given(st.lists(st.tuples(updates(), st.booleans()), max_size=8), st.data())
def test_many_are_read_as_each_is_alone(
    several: list[tuple[tuple[FactoredRows, int], bool]], data: st.DataObject
) -> None:
    items, bodies = 5000, []
    for (update, _), harmed in several:
        body = bytearray(encoded(update, data.draw(st.sampled_from(ValueFormat))))
        if harmed:
            body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
        bodies.append(bytes(body[: data.draw(st.sampled_from([len(body), len(body) - 1]))]))
    width = data.draw(st.sampled_from([0, 0, 64]))
    together = decode_factored_each(bodies, items=items, width=width)
    for body, found in zip(bodies, together, strict=True):
        try:
            alone = decode_factored(body, items=items, width=width)
        except WireError as error:
            assert isinstance(found, WireError)
            assert (found.reason, str(found)) == (error.reason, str(error))
            continue
        assert not isinstance(found, WireError)
        for name, value in alone._asdict().items():
            read = getattr(found, name)
            np.testing.assert_array_equal(read, value)
            assert getattr(read, "dtype", int) == getattr(value, "dtype", int)


def require_sound(data: bytes, items: int, width: int) -> None:
    try:
        read = decode_factored(data, items=items, width=width)
    except WireError:
        return
    assert np.isfinite(read.pulls).all() and np.isfinite(read.factor).all()
    assert (np.diff(read.rows) > 0).all()
    assert len(read.rows) == 0 or 0 <= read.rows[0] <= read.rows[-1] < items
    assert 1 <= read.k <= width
    height = len(read.factor)
    assert height <= min(read.users, width) and read.users <= MOST_USERS
    assert read.pulls.shape == (len(read.rows), height)
    assert read.factor.shape == (height, width)
    assert read.counts.shape == read.rows.shape
    assert ((read.counts >= 1) & (read.counts <= read.users)).all()
    assert read.pulls.nbytes + read.factor.nbytes <= 4 * len(data)


HEAD = b"\x11\x02\x00\x01"  # float32, K = 2, of which one was trained
LARGE = encode_number(MOST_USERS + 1)
ONE = HEAD + b"\x01\x01\x01"  # a user, a row of the factor, a row


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"\x11\x02", "truncated"),
        (b"\x10\x02\x00\x01\x00\x00\x00", "bad-format"),
        (b"\x14\x02\x00\x01\x00\x00\x00", "bad-format"),
        (b"\x01\x02\x00\x01\x00\x00\x00", "bad-format"),  # the other body's
        (b"\x11\x03\x00\x01\x00\x00\x00", "bad-columns"),  # another width
        (b"\x11\x02\x00\x00\x00\x00\x00", "bad-columns"),  # trained none
        (b"\x11\x02\x00\x03\x00\x00\x00", "bad-columns"),  # three of two
        (HEAD, "bad-rows"),
        (HEAD + b"\x00\x00", "bad-rows"),
        (HEAD + b"\x80\x00\x00\x00", "bad-rows"),  # not in its shortest form
        (HEAD + LARGE + b"\x01\x00", "bad-users"),
        (HEAD + b"\x00\x01\x00" + bytes(8), "bad-users"),  # a factor of nobody
        (HEAD + b"\x01\x02\x00" + bytes(16), "bad-users"),  # of more than the users
        (HEAD + b"\x03\x03\x00" + bytes(24), "bad-users"),  # of more than the columns
        (HEAD + b"\x00\x00\x01\x00", "bad-users"),  # an item of nobody
        (HEAD + b"\x02\x00\x01\x00\x00", "bad-users"),  # an item that none of two has
        (HEAD + b"\x02\x00\x01\x00\x03", "bad-users"),  # three of two
        (HEAD + b"\x02\x00\x01\x00", "bad-rows"),  # without its count
        (HEAD + b"\x02\x00\x01\x00\x80\x00", "bad-rows"),  # not in its shortest form
        (ONE + b"\x0a" + bytes(12), "bad-rows"),  # id 10 of 10 items
        (HEAD + b"\x01\x01\x0b" + bytes(60), "bad-rows"),  # more rows than items
        (ONE + b"\x00" + bytes(11), "bad-length"),
        (ONE + b"\x00" + bytes(13), "bad-length"),
        (ONE + b"\x00\x00\x00\xc0\x7f" + bytes(8), "bad-values"),  # a pull that is NaN
        (ONE + b"\x00" + bytes(8) + b"\x00\x00\x80\xff", "bad-values"),  # the factor's infinity
        (b"\x12\x02\x00\x01\x01\x01\x01\x00\x00\x7c" + bytes(4), "bad-values"),
        (b"\x13\x02\x00\x01\x01\x01\x01\x00\x80\x7f\x01" + bytes(4), "bad-values"),
        (b"\x13\x02\x00\x01\x01\x01\x01\x00\x00\x00\x01" + bytes(4), "bad-values"),
        (b"\x13\x02\x00\x01\x01\x01\x00\x80\x7f\x01\x00", "bad-values"),  # the factor's scale
    ],
)
def test_each_rule_refuses(data: bytes, reason: str) -> None:
    assert reason_of(decode_factored, data, items=10, width=2) == reason


@pytest.mark.parametrize("count", [b"\x01", b"\xff\xff\xff\xff\x0f", b"\xff\xff\x03"])
def test_what_a_few_bytes_announce_takes_no_memory(count: bytes) -> None:
    announced = [
        b"\x11\x08\x00\x01" + encode_number(MOST_USERS) + b"\x08" + count + bytes(40),
        b"\x13\x00\x10\x01" + encode_number(MOST_USERS) + encode_number(4096) + count + bytes(600),
    ]
    for data, width in zip(announced, (8, 4096), strict=True):
        tracemalloc.start()
        with pytest.raises(WireError):
            decode_factored(data, items=1 << 31, width=width)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 100_000


def test_of_one_user_an_update_is_some_400_bytes() -> None:
    """Of MovieLens 1M's: 165 of 3,706 items."""
    sizes = [len(encoded(drawn(seed, 3706, 64, 165, 1, 1), ValueFormat.INT8)) for seed in range(20)]
    assert np.mean(sizes) < 420


def test_the_two_bodies_are_told_apart_by_their_first_byte() -> None:
    sparse = SparseRows(np.arange(2), np.arange(3), np.ones((3, 2), dtype=np.float32), width=8)
    for each in ValueFormat:
        assert not is_factored(encode_sparse(sparse, each, np.random.default_rng(0)))
    assert not is_factored(b"")


def test_caller_is_told_what_does_not_fit() -> None:
    good = drawn(0, 100, 8, 3, 5, 2, 4)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"k": 0}, "k 0 of width 8"),
        ({"k": 9}, "k 9 of width 8"),
        ({"rows": good.rows[::-1]}, "strictly increasing"),
        ({"pulls": good.pulls[:2]}, "pulls .* float32"),
        ({"pulls": good.pulls.astype(np.float64)}, "pulls .* float32"),
        ({"pulls": good.pulls * np.float32(np.nan)}, "finite"),
        ({"factor": good.factor[:, :1]}, "factor .* float32"),
        ({"factor": good.factor * np.float32(np.inf)}, "finite"),
        ({"users": 1}, "do not go together"),
        ({"users": -1}, "do not go together"),
        ({"users": MOST_USERS + 1}, "do not go together"),
        ({"counts": good.counts * 0}, "from 1 to 5"),
        ({"counts": good.counts + 5}, "from 1 to 5"),
        ({"counts": good.counts[:2]}, "from 1 to 5"),
        ({"width": 0}, "width"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            encode_factored(good._replace(**change), ValueFormat.FLOAT32)
    with pytest.raises(ValueError, match="Generator"):
        encode_factored(good, ValueFormat.INT8)


@pytest.mark.parametrize("part", ["pulls", "factor"])
def test_both_parts_travel_in_the_format_that_holds_them(part: str) -> None:
    good = drawn(0, 100, 8, 3, 5, 2, 4)
    huge = good._replace(**{part: np.full_like(getattr(good, part), 1e6)})
    read = decode_factored(encode_factored(huge, ValueFormat.FLOAT16), items=100, width=8)
    np.testing.assert_array_equal(read.pulls, huge.pulls)
    np.testing.assert_array_equal(read.factor, huge.factor)
