"""The body of a scatter update: some rows of some columns of an item matrix.

Little-endian: ``value format 1 | K 2 | row count, LEB128 | bitset of columns, ceil(K / 8) | row ids
| values``. Row ids are strictly increasing, and travel as variable-length gaps, parsed without a
loop. Values, row by row: ``FLOAT32`` 4 bytes each, ``FLOAT16`` 2 bytes each, ``INT8`` a bfloat16
scale for each row, then a byte each (``tensors.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.arrays.tensors import (
    LARGEST_VALUE,
    Codec,
    dequantise,
    encode_values,
)
from device_sdk.wire.codec.errors import WireError

T = TypeVar("T")
_MOST_BYTES = 5
LARGEST_ID = 2**31 - 1


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
    return encode_numbers(np.diff(ids, prepend=-1) - 1)


def encode_numbers(numbers: NDArray[np.int64]) -> bytes:
    """Each of them, 0 to 2^31 - 1, as by :func:`encode_number`."""
    # Seven bits a column, as many columns as the largest takes.
    most = max(1, -(-int(numbers.max(initial=0)).bit_length() // 7))
    sevens = numbers[:, None] >> 7 * np.arange(most)
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
    most = min(len(data) - offset, count * _MOST_BYTES)
    steps, ends = _steps(np.frombuffer(data, np.uint8, most, offset), count)
    steps[0] -= 1
    ids = np.add.accumulate(steps)
    if int(ids[-1]) >= bound:
        raise WireError("bad-rows", f"an id is not below {bound}")
    return ids, offset + int(ends[-1]) + 1


def decode_numbers(data: bytes, offset: int, count: int) -> tuple[NDArray[np.int64], int]:
    """``count`` numbers, int64, and the offset after them. Raises ``WireError("bad-rows")``."""
    if count == 0:
        return np.empty(0, dtype=np.int64), offset
    most = min(max(0, len(data) - offset), count * _MOST_BYTES)
    steps, ends = _steps(np.frombuffer(data, np.uint8, most, offset), count)
    return steps - 1, offset + int(ends[-1]) + 1


def _steps(raw: NDArray[np.uint8], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first ``count`` numbers in ``raw``, each plus one, and the places of their last bytes.

    Below 2^35 + 1 each, and as many as a message or a group of them holds: sums do not overflow.
    """
    ends = (raw < 128).nonzero()[0][:count]
    if len(ends) < count:
        raise WireError("bad-rows", "the ids are cut short")
    steps = raw[ends].astype(np.int64)
    if int(ends[-1]) >= count:
        # Some take several bytes.
        lengths = np.diff(ends, prepend=-1)
        if int(lengths.max()) > _MOST_BYTES or ((steps == 0) & (lengths > 1)).any():
            raise WireError("bad-rows", "an id is not in its shortest form")
        for more in range(1, int(lengths.max())):
            longer = (lengths > more).nonzero()[0]
            # What stands before the last byte, the nearest first: seven bits each, lower ones.
            lower = raw[ends[longer] - more] & 127
            steps[longer] = steps[longer] << 7 | lower
    steps += 1
    return steps, ends


MAX_WIDTH = 4096
_HEAD = struct.Struct("<BH")


class ValueFormat(IntEnum):
    """How values travel: some of :class:`Codec`."""

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

    Values that ``value_format`` does not hold travel in a wider one (:class:`Codec`). Raises
    ValueError for arrays that do not fit each other, ids out of order, and values that are not
    finite or exceed 1e12.
    """
    columns, values = update.columns, update.values
    if not 1 <= update.width <= MAX_WIDTH:
        raise ValueError(f"width is {update.width}; expected 1 to {MAX_WIDTH}")
    if values.dtype != np.float32 or values.shape != (len(update.rows), len(columns)):
        raise ValueError(
            f"values are {values.dtype} {values.shape}; expected float32 "
            f"{(len(update.rows), len(columns))}"
        )
    used, payload = encode_parts([values], value_format, rng)
    return b"".join(
        (
            _HEAD.pack(used, update.width),
            encode_number(len(update.rows)),
            _encode_columns(columns, update.width),
            encode_ids(update.rows),
            *payload,
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
    values = decode_values(data, offset, (len(rows), len(columns)), value_format)
    return SparseRows(columns, rows, values, width)


# Many updates at once, as an aggregator has them: what numpy costs a call is paid once for all.


def decode_sparse_each(
    bodies: Sequence[bytes], *, items: int, width: int
) -> list[SparseRows | WireError]:
    """Each of ``bodies`` as :func:`decode_sparse` has it, an error in the place of a bad one.

    The arrays of bodies that were read together are views of common ones, and read-only.
    """
    found: list[SparseRows | WireError | None] = [None] * len(bodies)
    alike: dict[tuple[int, int], list[_Sliced]] = {}
    for place, body in enumerate(bodies):
        sliced = _sliced(place, body, width)
        if sliced is not None:
            alike.setdefault((body[0], sliced.columns), []).append(sliced)
    for (code, columns), group in alike.items():
        _read_together(group, _FORMATS[code], (items, width), columns, found)
    return the_rest_apart(found, bodies, partial(decode_sparse, items=items, width=width))


def the_rest_apart(
    found: Sequence[T | WireError | None], bodies: Sequence[bytes], decode: Callable[[bytes], T]
) -> list[T | WireError]:
    """What was ``found`` of each of ``bodies`` together; where nothing was, what ``decode`` makes
    of it by itself, or its ``WireError``."""

    def alone(body: bytes) -> T | WireError:
        try:
            return decode(body)
        except WireError as error:
            return error

    return [alone(bodies[place]) if r is None else r for place, r in enumerate(found)]


class _Sliced(NamedTuple):
    """A body's parts. The length of the ids, which nothing announces, is what the others leave."""

    place: int
    rows: int
    columns: int
    bits: bytes
    ids: bytes
    scales: bytes
    values: bytes


_VALUE_BYTES = {int(each): (0, size) for each, size in zip(ValueFormat, (4, 2, 1), strict=True)}
_VALUE_BYTES[int(_INT8)] = (2, 1)
"""Of a row's scale, and of a value."""


def _sliced(place: int, body: bytes, width: int) -> _Sliced | None:
    """The parts of a body, if they can be told apart; what is in them is not looked at."""
    if len(body) < _HEAD.size + 1 or body[1] | body[2] << 8 != width:
        return None
    sizes = _VALUE_BYTES.get(body[0])
    if sizes is None:
        return None
    rows, at = body[_HEAD.size], _HEAD.size + 1
    if rows > 127:
        try:
            rows, at = decode_number(body, _HEAD.size)
        except WireError:
            return None
    ids_at = at + -(-width // 8)
    bits = body[at:ids_at]
    columns = int.from_bytes(bits, "little").bit_count()
    scales_at = len(body) - rows * (sizes[0] + sizes[1] * columns)
    if not (columns and rows and 0 <= scales_at - ids_at - rows <= (_MOST_BYTES - 1) * rows):
        return None
    values_at = scales_at + sizes[0] * rows
    return _Sliced(
        place,
        rows,
        columns,
        bits,
        body[ids_at:scales_at],
        body[scales_at:values_at],
        body[values_at:],
    )


def _read_together(
    group: Sequence[_Sliced],
    value_format: ValueFormat,
    shape: tuple[int, int],
    columns: int,
    found: list[SparseRows | WireError | None],
) -> None:
    """Put what ``group`` holds, bodies of one format and number of columns, into its places.

    A bad one is found by halves, and its place stays as it is: what is wrong with it is for
    :func:`decode_sparse` to say.
    """
    try:
        read = _together(group, value_format, shape, columns)
    except WireError:
        if len(group) > 1:
            middle = len(group) // 2
            for half in (group[:middle], group[middle:]):
                _read_together(half, value_format, shape, columns, found)
        return
    for sliced, each in zip(group, read, strict=True):
        found[sliced.place] = each


def _together(
    group: Sequence[_Sliced], value_format: ValueFormat, shape: tuple[int, int], columns: int
) -> Iterator[SparseRows]:
    items, width = shape
    counts = [each.rows for each in group]
    rows = ids_of_each(
        b"".join([each.ids for each in group]), counts, [len(each.ids) for each in group], items
    )
    bits = np.frombuffer(b"".join([each.bits for each in group]), np.uint8)
    used = np.unpackbits(bits.reshape(len(group), -1), axis=1, bitorder="little")
    drawn = used.nonzero()[1].astype(np.int64, copy=False).reshape(len(group), columns)
    if int(drawn[:, -1].max()) >= width:
        raise WireError("bad-columns", f"expected all columns below {width}")
    parts = [each.scales for each in group] + [each.values for each in group]
    values = decode_values(b"".join(parts), 0, (len(rows), columns), value_format)
    for array in (rows, drawn, values):
        array.setflags(write=False)
    ends = accumulate(counts)
    return (
        SparseRows(drawn[place], rows[end - count : end], values[end - count : end], width)
        for place, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def ids_of_each(
    data: bytes, counts: Sequence[int], lengths: Sequence[int], bound: int
) -> NDArray[np.int64]:
    """What :func:`decode_ids` has of several lists, of ``counts`` ids in ``lengths`` bytes each.

    No list is empty. Raises ``WireError("bad-rows")``.
    """
    last = np.cumsum(counts) - 1
    raw = np.frombuffer(data, dtype=np.uint8)
    steps, ends = _steps(raw, int(last[-1]) + 1)
    # Where the last of each list ends, the list does.
    if (ends[last] + 1 != np.cumsum(lengths)).any():
        raise WireError("bad-rows", "ids of another number than announced")
    ids = np.add.accumulate(steps)
    before = np.zeros(len(counts), dtype=np.int64)
    before[1:] = ids[last[:-1]]
    ids -= np.repeat(before + 1, counts)
    if int(ids[last].max()) >= bound:
        raise WireError("bad-rows", f"an id is not below {bound}")
    return ids


def _encode_columns(columns: NDArray[np.int64], width: int) -> bytes:
    """A bitset. Raises ValueError unless ``columns``, not none, rise strictly below ``width``."""
    if columns.ndim != 1 or not 1 <= len(columns) <= width:
        raise ValueError("an update holds at least one column and at most its width")
    if columns[0] < 0 or columns[-1] >= width or not (columns[1:] > columns[:-1]).all():
        raise ValueError(f"columns must rise strictly, from 0 to {width - 1}")
    bits = np.zeros(width, dtype=bool)
    bits[columns] = True
    return np.packbits(bits, bitorder="little").tobytes()


def _decode_columns(data: bytes, offset: int, width: int) -> tuple[NDArray[np.int64], int]:
    size = -(-width // 8)
    if len(data) - offset < size:
        raise WireError("truncated", "the update ends within its columns")
    bits = np.unpackbits(np.frombuffer(data, np.uint8, size, offset), bitorder="little")
    columns = bits.nonzero()[0]
    if len(columns) == 0 or columns[-1] >= width:
        raise WireError("bad-columns", f"expected at least one column, all below {width}")
    return columns if columns.dtype == _INT64 else columns.astype(np.int64), offset + size


def value_bytes(shape: tuple[int, int], value_format: ValueFormat) -> int:
    """Bytes of values [rows, columns]."""
    of_row, of_value = _VALUE_BYTES[int(value_format)]
    return shape[0] * of_row + shape[0] * shape[1] * of_value


def encode_parts(
    parts: Sequence[NDArray[np.float32]],
    value_format: ValueFormat,
    rng: np.random.Generator | None,
) -> tuple[ValueFormat, list[bytes]]:
    """The bytes of some [rows, columns] in one format, and which: ``value_format``, or a wider one
    where that does not hold them all. Raises ValueError for values that none does."""
    used: list[Codec] = []
    payload: list[bytes] = []
    for values in parts:
        codec, found = encode_values(values, Codec(value_format), rng)
        used.append(codec)
        payload += found
    widest = min(used)
    if int(widest) == int(value_format):
        return value_format, payload
    return encode_parts(parts, ValueFormat(widest), rng)


def decode_values(
    data: bytes, offset: int, shape: tuple[int, int], value_format: ValueFormat
) -> NDArray[np.float32]:
    """The values [rows, columns] that ``data`` ends with, from ``offset`` on. Raises ``WireError``:
    ``bad-length``, ``bad-values``."""
    size = value_bytes(shape, value_format)
    if len(data) - offset != size:
        raise WireError("bad-length", f"{len(data) - offset} bytes of values, expected {size}")
    if value_format is _INT8:
        scales = np.ndarray(shape[0], _SCALE, data, offset)
        codes = np.ndarray(shape, _CODE, data, offset + 2 * shape[0])
        return dequantise(scales, codes)
    stored = "<f4" if value_format is ValueFormat.FLOAT32 else "<f2"
    values = np.frombuffer(data, dtype=stored, offset=offset).reshape(shape).astype(np.float32)
    if values.size and not float(np.abs(values).max()) <= LARGEST_VALUE:
        raise WireError("bad-values", "a value is not finite or exceeds 1e12")
    return values
