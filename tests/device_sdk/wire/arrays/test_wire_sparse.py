from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.arrays.sparse import (
    SparseRows,
    ValueFormat,
    decode_ids,
    decode_sparse,
    decode_sparse_each,
    encode_ids,
    encode_number,
    encode_sparse,
)
from device_sdk.wire.arrays.tensors import dequantise, quantise, scale_values
from device_sdk.wire.codec.errors import WireError
from tests.fakes.refusals import mutated, reason_of


def drawn(seed: int, items: int, width: int, rows: int, columns: int) -> SparseRows:
    rng = np.random.default_rng(seed)
    return SparseRows(
        np.sort(rng.choice(width, columns, replace=False)).astype(np.int64),
        np.sort(rng.choice(items, rows, replace=False)).astype(np.int64),
        (rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-8, 4)).astype(np.float32),
        width,
    )


@st.composite
def updates(draw: st.DrawFn) -> tuple[SparseRows, int]:
    items = draw(st.integers(1, 5000))
    width = draw(st.integers(1, 130))
    rows = draw(st.integers(0, min(items, 40)))
    columns = draw(st.integers(1, width))
    return drawn(draw(st.integers(0, 2**32)), items, width, rows, columns), items


@given(updates(), st.sampled_from(ValueFormat))
def test_round_trip(given_update: tuple[SparseRows, int], value_format: ValueFormat) -> None:
    update, items = given_update
    data = encode_sparse(update, value_format, np.random.default_rng(0))
    read = decode_sparse(data, items=items, width=update.width)
    np.testing.assert_array_equal(read.columns, update.columns)
    np.testing.assert_array_equal(read.rows, update.rows)
    assert read.rows.dtype == read.columns.dtype == np.int64
    assert read.values.dtype == np.float32
    assert read.values.shape == update.values.shape
    if update.values.size == 0:
        return
    if value_format is ValueFormat.FLOAT32:
        np.testing.assert_array_equal(read.values, update.values)
    elif value_format is ValueFormat.FLOAT16:
        np.testing.assert_allclose(read.values, update.values, rtol=2.0**-11, atol=2.0**-25)
    else:
        step = np.abs(update.values).max(axis=1) / 127 * 1.0079
        assert (np.abs(read.values - update.values) <= step[:, None] * 1.0001).all()


@given(updates(), st.sampled_from(ValueFormat), st.data())
def test_mutated_bytes_are_refused_or_valid(
    given_update: tuple[SparseRows, int], value_format: ValueFormat, data: st.DataObject
) -> None:
    update, items = given_update
    require_sound(
        mutated(encode_sparse(update, value_format, np.random.default_rng(0)), data),
        items,
        update.width,
    )


@given(st.lists(st.tuples(updates(), st.sampled_from(ValueFormat)), max_size=8), st.data())
def test_many_read_together_are_what_each_is_by_itself(
    given_updates: list[tuple[tuple[SparseRows, int], ValueFormat]], data: st.DataObject
) -> None:
    items, width = data.draw(st.integers(1, 5000)), data.draw(st.sampled_from([8, 64, 130]))
    bodies = []
    for (update, _), value_format in given_updates:
        seed = data.draw(st.integers(0, 2**32))
        columns = data.draw(st.sampled_from([1, width // 2, width]))
        alike = drawn(seed, items, width, 0, columns)
        # An id may be too large for this catalogue: then it is a bad one.
        rows = update.rows[: len(update.rows) if items > 40 else 1]
        rng = np.random.default_rng(seed)
        values = rng.standard_normal((len(rows), columns), dtype=np.float32)
        values[:1] *= data.draw(st.sampled_from([0.0, 1.0]))
        body = bytearray(
            encode_sparse(SparseRows(alike.columns, rows, values, width), value_format, rng)
        )
        for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 2]))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.sampled_from([0, 0, 0, 0, 1, 5]))
        bodies.append(bytes(body[: len(body) - cut]))
    together = decode_sparse_each(bodies, items=items, width=width)
    assert len(together) == len(bodies)
    for body, found in zip(bodies, together, strict=True):
        try:
            alone = decode_sparse(body, items=items, width=width)
        except WireError as error:
            assert isinstance(found, WireError)
            assert (found.reason, str(found)) == (error.reason, str(error))
            continue
        assert isinstance(found, SparseRows)
        assert found.width == alone.width
        for one, other in zip(found[:3], alone[:3], strict=True):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert one.tobytes() == other.tobytes()


@given(st.lists(st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=20), max_size=6))
def test_ids_of_any_length_are_read_together(lists: list[set[int]]) -> None:
    updates = [
        SparseRows(
            np.arange(3),
            np.array(sorted(numbers), dtype=np.int64),
            np.ones((len(numbers), 3), np.float32),
            8,
        )
        for numbers in lists
    ]
    bodies = [encode_sparse(update, ValueFormat.FLOAT16) for update in updates]
    found = decode_sparse_each(bodies, items=2**31, width=8)
    for each, update in zip(found, updates, strict=True):
        assert isinstance(each, SparseRows)
        np.testing.assert_array_equal(each.rows, update.rows)
        assert not each.rows.flags.writeable


@given(st.binary(max_size=300), st.integers(1, 100_000), st.integers(1, 80))
def test_any_bytes_are_refused_or_valid(data: bytes, items: int, width: int) -> None:
    require_sound(data, items, width)


def require_sound(data: bytes, items: int, width: int) -> None:
    try:
        read = decode_sparse(data, items=items, width=width)
    except WireError:
        return
    assert np.isfinite(read.values).all()
    assert len(read.rows) == 0 or (read.rows[0] >= 0 and read.rows[-1] < items)
    assert (np.diff(read.rows) > 0).all()
    assert (np.diff(read.columns) > 0).all()
    assert 0 <= read.columns[0] <= read.columns[-1] < width
    assert read.values.nbytes <= 4 * len(data)


def test_size_is_the_one_promised() -> None:
    sizes = [
        len(
            encode_sparse(
                drawn(seed, 30_000, 64, 50, 32), ValueFormat.INT8, np.random.default_rng(seed)
            )
        )
        for seed in range(20)
    ]
    assert np.mean(sizes) < 1810  # 1,790 without the columns' bitset and the header


def test_decoding_is_fast_enough_for_thousands_a_second() -> None:
    data = encode_sparse(drawn(1, 3706, 64, 100, 16), ValueFormat.INT8, np.random.default_rng(1))
    times = []
    for _ in range(200):
        started = time.thread_time()
        decode_sparse(data, items=3706, width=64)
        times.append(time.thread_time() - started)
    # The fastest, in CPU time: a busy machine must not fail this.
    assert min(times) < 400e-6


HEAD = b"\x01\x08\x00"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"\x00\x08\x00\x00\x01", "bad-format"),
        (b"\x04\x08\x00\x00\x01", "bad-format"),
        (b"\x01\x09\x00\x00\x01", "bad-columns"),  # another width
        (HEAD, "bad-rows"),
        (HEAD + b"\x00", "truncated"),
        (HEAD + b"\x00\x00", "bad-columns"),  # none
        (HEAD + b"\x80\x00\x01", "bad-rows"),  # count not in its shortest form
        (HEAD + b"\x0b\x01" + bytes(11), "bad-rows"),  # more rows than items
        (HEAD + b"\x02\x01\x00", "bad-rows"),  # cut short
        (HEAD + b"\x01\x01\x0a" + bytes(4), "bad-rows"),  # id 10 of 10 items
        (HEAD + b"\x01\x01\x80\x00" + bytes(4), "bad-rows"),
        (HEAD + b"\x01\x01\xff\xff\xff\xff\xff\x01" + bytes(4), "bad-rows"),
        (HEAD + b"\x01\x01\x00" + bytes(3), "bad-length"),
        (HEAD + b"\x01\x01\x00" + bytes(5), "bad-length"),
        (HEAD + b"\x01\x01\x00\x00\x00\xc0\x7f", "bad-values"),  # NaN
        (HEAD + b"\x01\x01\x00\x00\x00\x80\xff", "bad-values"),  # minus infinity
        (HEAD + b"\x01\x01\x00\xff\xff\x7f\x7f", "bad-values"),  # 3e38
        (b"\x02\x08\x00\x01\x01\x00\x00\x7c", "bad-values"),
        (b"\x03\x08\x00\x01\x01\x00\x80\x7f\x01", "bad-values"),  # scale infinity
        (b"\x03\x08\x00\x01\x01\x00\xc0\x7f\x01", "bad-values"),  # scale NaN
        (b"\x03\x08\x00\x01\x01\x00\x80\xbf\x01", "bad-values"),  # scale -1
        (b"\x03\x08\x00\x01\x01\x00\x00\x80\x00", "bad-values"),  # scale -0
        (b"\x03\x08\x00\x01\x01\x00\x01\x00\x01", "bad-values"),  # scale subnormal
        (b"\x03\x08\x00\x01\x01\x00\x00\x00\x01", "bad-values"),  # code beside scale 0
        (b"\x03\x08\x00\x01\x01\x00\x80\x3f\x80", "bad-values"),  # code -128
    ],
)
def test_each_rule_refuses(data: bytes, reason: str) -> None:
    assert reason_of(decode_sparse, data, items=10, width=8) == reason


def test_stochastic_rounding_has_the_right_mean() -> None:
    rng = np.random.default_rng(5)
    values = np.array([[1.0, 0.3, -0.004, 0.0]], dtype=np.float32)
    draws = np.array([dequantise(*quantise(values, rng))[0] for _ in range(4000)])
    step = 1 / 127 * 1.0079
    np.testing.assert_allclose(draws.mean(axis=0), values[0], atol=5 * step / 2 / 4000**0.5)
    assert (draws[:, 3] == 0).all()


def test_scales_round_up_and_tiny_rows_become_zero() -> None:
    values = np.array([[3.3], [1e-33], [1e12]], dtype=np.float32)
    scales, codes = quantise(values, np.random.default_rng(0))
    factors = scale_values(scales)
    assert 3.3 / 127 <= factors[0] <= 3.3 / 127 * 1.0079
    assert scales[1] == 0 and codes[1, 0] == 0
    assert np.isfinite(dequantise(scales, codes)).all()


@given(st.sets(st.integers(0, 2**31 - 1), max_size=60))
def test_ids_round_trip(numbers: set[int]) -> None:
    ids = np.array(sorted(numbers), dtype=np.int64)
    gaps = np.diff(ids, prepend=-1) - 1
    assert encode_ids(ids) == b"".join(map(encode_number, gaps.tolist()))
    data = b"??" + encode_ids(ids) + b"!!"
    read, end = decode_ids(data, 2, len(ids), 2**31)
    np.testing.assert_array_equal(read, ids)
    assert end == len(data) - 2


def test_caller_is_told_what_does_not_fit() -> None:
    good = drawn(0, 100, 8, 3, 2)
    rng = np.random.default_rng(0)
    for columns, rows, values, width, message in (
        (good.columns[::-1], good.rows, good.values, 8, "rise strictly"),
        (good.columns, good.rows[::-1], good.values, 8, "strictly increasing"),
        (good.columns, good.rows, good.values[:2], 8, "float32"),
        (good.columns, good.rows, good.values * np.float32(np.nan), 8, "finite"),
        (good.columns[:0], good.rows, good.values[:, :0], 8, "at least one column"),
        (good.columns, good.rows, good.values, 0, "width"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_sparse(SparseRows(columns, rows, values, width), ValueFormat.INT8, rng)
    with pytest.raises(ValueError, match="Generator"):
        encode_sparse(good, ValueFormat.INT8)
    huge = SparseRows(good.columns, good.rows, np.full_like(good.values, 1e6), 8)
    read = decode_sparse(encode_sparse(huge, ValueFormat.FLOAT16), items=100, width=8)
    np.testing.assert_array_equal(read.values, huge.values)
