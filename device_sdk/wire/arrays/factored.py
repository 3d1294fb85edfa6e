"""The body of a least-squares update: a gradient and a Gram matrix, by what both are products of.

A device's users hand in the sum of their gradients, [rows, columns], and of their outer products,
[columns, columns]. With U its users' vectors and R their residuals these are R'U and U'U = W S^2 W'
(its eigenvectors, as many as it has that are not 0). So ``pulls`` R'U W / S and ``factor`` F = S W'
follow from the two sums, which are ``pulls`` F and F'F, and say nothing else. A Gram matrix that is
not symmetric, or not positive, cannot be written down. Of one user F is its vector, and an update
some 500 bytes.

Little-endian: ``16 + value format 1 | K 2 | users, LEB128 | height f of the factor, LEB128 | row
count, LEB128 | bitset of columns, ceil(K / 8) | row ids | counts, LEB128 each, where there are two
users or more | pulls, f rows of [row count] | factor, f rows of [columns]``. Pulls travel in the
value format as rows do (``sparse.py``), the factor in float16, or float32 where they do.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.arrays.sparse import (
    MAX_WIDTH,
    ValueFormat,
    decode_columns,
    decode_ids,
    decode_number,
    decode_numbers,
    decode_values,
    encode_columns,
    encode_ids,
    encode_number,
    encode_numbers,
    encode_values,
    value_bytes,
)
from device_sdk.wire.codec.errors import WireError

MOST_USERS = 1 << 16
"""Of one device."""
_FIRST = 16
_HEAD = struct.Struct("<BH")
_FORMATS = {_FIRST + int(each): each for each in ValueFormat}


class FactoredRows(NamedTuple):
    """``pulls @ factor`` are rows and columns of a matrix of width ``width``.

    ``columns`` int64 [k] strictly increasing below ``width``, at least one; ``rows`` int64 [r]
    strictly increasing; ``pulls`` float32 [r, f]; ``factor`` float32 [f, k]; ``counts`` int64 [r],
    from 1 to ``users``; f is at most ``users`` and at most k.
    """

    columns: NDArray[np.int64]
    rows: NDArray[np.int64]
    pulls: NDArray[np.float32]
    factor: NDArray[np.float32]
    counts: NDArray[np.int64]
    users: int
    width: int


def is_factored(body: bytes) -> bool:
    """Whether a body says that it is of this format."""
    return body[:1] != b"" and body[0] in _FORMATS


def encode_factored(
    update: FactoredRows, value_format: ValueFormat, rng: np.random.Generator | None = None
) -> bytes:
    """The bytes of an update. ``rng`` is needed for ``INT8`` only (stochastic rounding).

    Raises ValueError for arrays that do not fit each other, ids out of order, and values that are
    not finite or that the format cannot carry.
    """
    height, rows, columns = len(update.factor), len(update.rows), len(update.columns)
    if not 1 <= update.width <= MAX_WIDTH:
        raise ValueError(f"width is {update.width}; expected 1 to {MAX_WIDTH}")
    if not 0 <= update.users <= MOST_USERS or height > min(update.users, columns):
        raise ValueError(f"{update.users} users and a factor of {height} rows do not go together")
    for name, shape in (("pulls", (rows, height)), ("factor", (height, columns))):
        found = getattr(update, name)
        if found.dtype != np.float32 or found.shape != shape:
            raise ValueError(f"{name} are {found.dtype} {found.shape}; expected float32 {shape}")
    counts = update.counts
    if counts.shape != (rows,) or (rows and not 1 <= counts.min() <= counts.max() <= update.users):
        raise ValueError(f"counts are expected to be [{rows}], from 1 to {update.users} users")
    parts = [
        _HEAD.pack(_FIRST + value_format, update.width),
        encode_number(update.users),
        encode_number(height),
        encode_number(rows),
        encode_columns(update.columns, update.width),
        encode_ids(update.rows),
    ]
    if update.users > 1:
        parts.append(encode_numbers(counts))
    parts.append(encode_values(np.ascontiguousarray(update.pulls.T), value_format, rng))
    parts.append(encode_values(update.factor, _of_factor(value_format), rng))
    return b"".join(parts)


def decode_factored(data: bytes, *, items: int, width: int) -> FactoredRows:
    """The update in ``data``, for a matrix of ``items`` rows and ``width`` columns.

    Memory is at most a small multiple of ``len(data)``. Raises ``WireError``: ``truncated``,
    ``bad-format``, ``bad-columns``, ``bad-rows``, ``bad-users``, ``bad-values``, ``bad-length``.
    """
    if len(data) < _HEAD.size:
        raise WireError("truncated", f"{len(data)} bytes are too few for an update")
    code, announced = _HEAD.unpack_from(data)
    value_format = _FORMATS.get(code)
    if value_format is None:
        raise WireError("bad-format", f"value format {code} is unknown")
    if announced != width:
        raise WireError("bad-columns", f"the update is of width {announced}, expected {width}")
    users, offset = decode_number(data, _HEAD.size)
    height, offset = decode_number(data, offset)
    count, offset = decode_number(data, offset)
    columns, offset = decode_columns(data, offset, width)
    if users > MOST_USERS or height > min(users, len(columns)):
        raise WireError("bad-users", "the users and the factor's height do not go together")
    rows, offset = decode_ids(data, offset, count, items)
    if users > 1:
        counts, offset = decode_numbers(data, offset, count)
    else:
        counts = np.ones(count, dtype=np.int64)
    if count and not 1 <= int(counts.min()) <= int(counts.max()) <= users:
        raise WireError("bad-users", "a row's count is expected to be from 1 to the users")
    split = offset + value_bytes((height, count), value_format)
    pulls = decode_values(data[:split], offset, (height, count), value_format)
    factor = decode_values(data, split, (height, len(columns)), _of_factor(value_format))
    return FactoredRows(columns, rows, np.ascontiguousarray(pulls.T), factor, counts, users, width)


def _of_factor(value_format: ValueFormat) -> ValueFormat:
    return ValueFormat.FLOAT32 if value_format is ValueFormat.FLOAT32 else ValueFormat.FLOAT16
