"""The body of a scatter update: some rows of some columns of an item matrix.

Little-endian: ``value format 1 | K 2 | row count, LEB128 | bitset of columns, ceil(K / 8) | row ids
| values``. Row ids are strictly increasing, and travel as variable-length gaps, parsed without a
loop. Values, row by row: ``FLOAT32`` 4 bytes each, ``FLOAT16`` 2 bytes each, ``INT8`` a bfloat16
scale for each row, then a byte each (``tensors.py``).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.arrays.tensors import (
    LARGEST_VALUE,
    check_values,
    dequantise,
    halves_of,
    quantise,
)
from device_sdk.wire.codec.errors import WireError

_MOST_BYTES = 5
LARGEST_ID = 2**31 - 1

_CONTINUING = bytes(range(128, 256))
_HIGH = bytes(128) + bytes([1]) * 128
"""Translates a byte to whether the number goes on behind it."""
_PLUS_ONE = bytes(range(1, 256)) + b"\x00"
_FEW = 16
"""So many ids of two bytes are cheaper to read one by one than with numpy's fixed costs."""


def encode_number(number: int) -> bytes:
    """LEB128: seven bits a byte, lowest first. Raises ValueError outside 0 to 2^31 - 1."""
    if not 0 <= number <= LARGEST_ID:
        raise ValueError(f"{number} is not within 0 to 2^31 - 1")
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def decode_number(data: bytes, offset: int) -> tuple[int, int]:
    """The number at ``offset``, and the offset after it. Raises ``WireError("bad-rows")``."""
    number = 0
    for index, byte in enumerate(data[offset : offset + _MOST_BYTES]):
        number |= (byte & 127) << 7 * index
        if byte < 128:
            if byte == 0 and index:
                raise WireError("bad-rows", "a count is not in its shortest form")
            return number, offset + index + 1
    raise WireError("bad-rows", "a count is cut short, or has more than five bytes")


def encode_ids(ids: NDArray[np.int64]) -> bytes:
    """The first id, then each gap minus one, as by :func:`encode_number`.

    Raises ValueError unless ``ids`` is one-dimensional, strictly increasing, within 0 to 2^31 - 1.
    """
    if ids.ndim != 1 or (
        ids.size and (ids[0] < 0 or ids[-1] > LARGEST_ID or not (ids[1:] > ids[:-1]).all())
    ):
        raise ValueError("ids must be strictly increasing, from 0 to 2^31 - 1")
    gaps = np.diff(ids, prepend=-1) - 1
    # Seven bits a column, as many columns as the largest takes.
    most = max(1, -(-int(gaps.max(initial=0)).bit_length() // 7))
    sevens = gaps[:, None] >> 7 * np.arange(most)
    used = sevens > 0
    used[:, 0] = True
    sevens &= 127
    sevens[:, :-1] |= used[:, 1:] * 128
    return sevens[used].astype(np.uint8).tobytes()


def decode_ids(data: bytes, offset: int, count: int, bound: int) -> tuple[NDArray[np.int64], int]:
    """``count`` ids below ``bound``, int64, and the offset after them.

    Raises ``WireError("bad-rows")``: cut short, not in the shortest form, or out of bounds. Ids
    rise by construction: there is no encoding of a repeated one.
    """
    if count > bound or count > len(data) - offset:
        raise WireError("bad-rows", f"{count} ids announced; they cannot fit")
    if count == 0:
        return np.empty(0, dtype=np.int64), offset
    steps, end = _mostly_short(data, offset, count) or _any_length(data, offset, count)
    steps[0] -= 1
    ids = np.add.accumulate(steps)
    # Gaps are below 2^35 and counts below 2^28 (ids do not fit a message otherwise): no overflow.
    if int(ids[-1]) >= bound:
        raise WireError("bad-rows", f"an id is not below {bound}")
    return ids, end


def _mostly_short(data: bytes, offset: int, count: int) -> tuple[NDArray[np.int64], int] | None:
    """The steps where none takes more than two bytes, and few take two: those one by one.

    None for all others, and for bytes that are wrong. A step is a gap plus one.
    """
    raw = data[offset : offset + 2 * count]
    marks = raw.translate(_HIGH)
    lasts = raw.translate(_PLUS_ONE, _CONTINUING)
    if len(lasts) < count:
        return None
    steps = np.frombuffer(lasts, np.uint8, count).astype(np.int64)
    used = count
    at = marks.find(1)
    while 0 <= at < used:
        place = at + count - used
        # The last byte of a long one is not 0, and follows at once.
        if lasts[place] == 1 or marks[at + 1] or used - count == _FEW:
            return None
        steps[place] = (lasts[place] - 1 << 7 | raw[at] & 127) + 1
        used += 1
        at = marks.find(1, at + 1)
    return steps, offset + used


def _any_length(data: bytes, offset: int, count: int) -> tuple[NDArray[np.int64], int]:
    """The steps (gaps plus one), however many of the gaps take several bytes."""
    most = min(len(data) - offset, count * _MOST_BYTES)
    raw = np.frombuffer(data, dtype=np.uint8, count=most, offset=offset)
    ends = np.flatnonzero(raw < 128)[:count]
    if len(ends) < count:
        raise WireError("bad-rows", "the ids are cut short")
    used = int(ends[-1]) + 1
    raw = raw[:used]
    starts = np.empty(count, dtype=np.int64)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts + 1
    if int(lengths.max()) > _MOST_BYTES or bool(((raw[ends] == 0) & (lengths > 1)).any()):
        raise WireError("bad-rows", "an id is not in its shortest form")
    shifts = 7 * (np.arange(used) - np.repeat(starts, lengths))
    gaps = np.add.reduceat((raw & 127).astype(np.int64) << shifts, starts)
    return gaps + 1, offset + used


MAX_WIDTH = 4096
_HEAD = struct.Struct("<BH")


class ValueFormat(IntEnum):
    """How values travel."""

    FLOAT32 = 1
    FLOAT16 = 2
    INT8 = 3


# Looked up for each of a fleet's updates: an enum's own look-up costs a microsecond.
_FORMATS = {int(each): each for each in ValueFormat}
_INT8 = ValueFormat.INT8
_SCALE, _CODE, _INT64 = np.dtype("<u2"), np.dtype(np.int8), np.dtype(np.int64)


class SparseRows(NamedTuple):
    """Rows and columns of a matrix of width ``width`` with their values.

    ``columns`` int64 [k] strictly increasing below ``width``, at least one; ``rows`` int64 [n]
    strictly increasing, n may be 0; ``values`` float32 [n, k].
    """

    columns: NDArray[np.int64]
    rows: NDArray[np.int64]
    values: NDArray[np.float32]
    width: int


def encode_sparse(
    update: SparseRows, value_format: ValueFormat, rng: np.random.Generator | None = None
) -> bytes:
    """The bytes of an update. ``rng`` is needed for ``INT8`` only (stochastic rounding).

    Raises ValueError for arrays that do not fit each other, ids out of order, values that are not
    finite, exceed 1e12, or for ``FLOAT16`` exceed 65,504.
    """
    columns, values = update.columns, update.values
    if not 1 <= update.width <= MAX_WIDTH:
        raise ValueError(f"width is {update.width}; expected 1 to {MAX_WIDTH}")
    if columns.ndim != 1 or not 1 <= len(columns) <= update.width:
        raise ValueError("an update holds at least one column and at most its width")
    if columns[0] < 0 or columns[-1] >= update.width or not (columns[1:] > columns[:-1]).all():
        raise ValueError(f"columns must rise strictly, from 0 to {update.width - 1}")
    if values.dtype != np.float32 or values.shape != (len(update.rows), len(columns)):
        raise ValueError(
            f"values are {values.dtype} {values.shape}; expected float32 "
            f"{(len(update.rows), len(columns))}"
        )
    bits = np.zeros(update.width, dtype=bool)
    bits[columns] = True
    return b"".join(
        (
            _HEAD.pack(value_format, update.width),
            encode_number(len(update.rows)),
            np.packbits(bits, bitorder="little").tobytes(),
            encode_ids(update.rows),
            _encode_values(values, value_format, rng),
        )
    )


def decode_sparse(data: bytes, *, items: int, width: int) -> SparseRows:
    """The update in ``data``, for a matrix of ``items`` rows and ``width`` columns.

    Memory is at most a small multiple of ``len(data)``. Raises ``WireError``: ``truncated``,
    ``bad-format``, ``bad-columns``, ``bad-rows``, ``bad-values``, ``bad-length``.
    """
    if len(data) < _HEAD.size:
        raise WireError("truncated", f"{len(data)} bytes are too few for an update")
    code, announced = _HEAD.unpack_from(data)
    value_format = _FORMATS.get(code)
    if value_format is None:
        raise WireError("bad-format", f"value format {code} is unknown")
    if announced != width:
        raise WireError("bad-columns", f"the update is of width {announced}, expected {width}")
    count, offset = decode_number(data, _HEAD.size)
    columns, offset = _decode_columns(data, offset, width)
    rows, offset = decode_ids(data, offset, count, items)
    values = _decode_values(data, offset, (len(rows), len(columns)), value_format)
    return SparseRows(columns, rows, values, width)


def _decode_columns(data: bytes, offset: int, width: int) -> tuple[NDArray[np.int64], int]:
    size = -(-width // 8)
    if len(data) - offset < size:
        raise WireError("truncated", "the update ends within its columns")
    bits = np.unpackbits(np.frombuffer(data, np.uint8, size, offset), bitorder="little")
    columns = bits.nonzero()[0]
    if len(columns) == 0 or columns[-1] >= width:
        raise WireError("bad-columns", f"expected at least one column, all below {width}")
    return columns if columns.dtype == _INT64 else columns.astype(np.int64), offset + size


def _encode_values(
    values: NDArray[np.float32], value_format: ValueFormat, rng: np.random.Generator | None
) -> bytes:
    check_values(values)
    if value_format is ValueFormat.FLOAT32:
        return values.astype("<f4").tobytes()
    if value_format is ValueFormat.FLOAT16:
        return halves_of(values).tobytes()
    if rng is None:
        raise ValueError("INT8 rounds stochastically: pass a numpy.random.Generator as rng")
    scales, codes = quantise(values, rng)
    return scales.astype("<u2").tobytes() + codes.tobytes()


def _decode_values(
    data: bytes, offset: int, shape: tuple[int, int], value_format: ValueFormat
) -> NDArray[np.float32]:
    rows, columns = shape
    if value_format is _INT8:
        size = 2 * rows + rows * columns
    else:
        size = (4 if value_format is ValueFormat.FLOAT32 else 2) * rows * columns
    if len(data) - offset != size:
        raise WireError("bad-length", f"{len(data) - offset} bytes of values, expected {size}")
    if value_format is _INT8:
        scales = np.ndarray(rows, _SCALE, data, offset)
        codes = np.ndarray(shape, _CODE, data, offset + 2 * rows)
        return dequantise(scales, codes)
    stored = "<f4" if value_format is ValueFormat.FLOAT32 else "<f2"
    values = np.frombuffer(data, dtype=stored, offset=offset).reshape(shape).astype(np.float32)
    if values.size and not float(np.abs(values).max()) <= LARGEST_VALUE:
        raise WireError("bad-values", "a value is not finite or exceeds 1e12")
    return values
