"""The body of a scatter update: some rows of some columns of an item matrix.

Little-endian: ``value format 1 | K 2 | row count, LEB128 | bitset of columns, ceil(K / 8) | row ids
| values``. Row ids are gaps (see ``varints``). Values, row by row: ``FLOAT32`` 4 bytes each,
``FLOAT16`` 2 bytes each, ``INT8`` a bfloat16 scale for each row, then a byte each (``quantise``).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.arrays.quantise import LARGEST_VALUE, check_values, dequantise, quantise
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.varints import decode_ids, decode_number, encode_ids, encode_number

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
        with np.errstate(over="ignore"):
            halves = values.astype("<f2")
        if not np.isfinite(halves).all():
            raise ValueError("a value exceeds 65,504, float16's largest; use INT8 or FLOAT32")
        return halves.tobytes()
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
