"""The body of a least-squares update: a gradient and a Gram matrix, by what both are products of.

A device's users hand in the sum of their gradients, [rows, K], and of their outer products, [K, K].
With U its users' vectors and R their residuals these are R'U and U'U = W S^2 W' (its eigenvectors,
as many as it has that are not 0). So ``pulls`` R'U W / S and ``factor`` F = S W' follow from the
two sums, which are ``pulls`` F and F'F, and say nothing else. A Gram matrix that is not symmetric,
or not positive, cannot be written down. Of one user F is its vector, and an update some 400 bytes.

Little-endian: ``16 + value format 1 | K 2 | k, users, height f of the factor, row count: LEB128
each | row ids | counts, LEB128 each, where there are two users or more | pulls, f rows of [row
count] | factor, f rows of [K]``. Row ids and values travel as in ``sparse.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.arrays.sparse import (
    MAX_WIDTH,
    ValueFormat,
    decode_ids,
    decode_number,
    decode_numbers,
    decode_values,
    encode_ids,
    encode_number,
    encode_numbers,
    encode_parts,
    ids_of_each,
    the_rest_apart,
    value_bytes,
)
from device_sdk.wire.codec.errors import WireError

MOST_USERS = 1 << 16
"""Of one device."""
_FIRST = 16
_HEAD = struct.Struct("<BH")
_FORMATS = {_FIRST + int(each): each for each in ValueFormat}


class FactoredRows(NamedTuple):
    """``pulls @ factor`` are rows of a matrix of width ``width``.

    ``rows`` int64 [r] strictly increasing; ``pulls`` float32 [r, f]; ``factor`` float32 [f, width],
    f at most ``users`` and at most ``width``; ``counts`` int64 [r], from 1 to ``users``; ``k``, 1
    to ``width``: how many columns were trained.
    """

    rows: NDArray[np.int64]
    pulls: NDArray[np.float32]
    factor: NDArray[np.float32]
    counts: NDArray[np.int64]
    users: int
    k: int
    width: int


def is_factored(body: bytes) -> bool:
    """Whether a body says that it is of this format."""
    return body[:1] != b"" and body[0] in _FORMATS


def encode_factored(
    update: FactoredRows, value_format: ValueFormat, rng: np.random.Generator | None = None
) -> bytes:
    """The bytes of an update. ``rng`` is needed for ``INT8`` only (stochastic rounding).

    Values that ``value_format`` does not hold travel in a wider one (:class:`Codec`). Raises
    ValueError for arrays that do not fit each other, ids out of order, and values that are not
    finite or exceed 1e12.
    """
    height, rows, width = len(update.factor), len(update.rows), update.width
    if not 1 <= update.k <= width <= MAX_WIDTH:
        raise ValueError(f"k {update.k} of width {width}; expected 1 to width, at most {MAX_WIDTH}")
    if not 0 <= update.users <= MOST_USERS or height > min(update.users, width):
        raise ValueError(f"{update.users} users and a factor of {height} rows do not go together")
    for name, shape in (("pulls", (rows, height)), ("factor", (height, width))):
        found = getattr(update, name)
        if found.dtype != np.float32 or found.shape != shape:
            raise ValueError(f"{name} are {found.dtype} {found.shape}; expected float32 {shape}")
    counts = update.counts
    if counts.shape != (rows,) or (rows and not 1 <= counts.min() <= counts.max() <= update.users):
        raise ValueError(f"counts are expected to be [{rows}], from 1 to {update.users} users")
    heads = (update.k, update.users, height, rows)
    parts = [np.ascontiguousarray(update.pulls.T), update.factor]
    used, payload = encode_parts(parts, value_format, rng)
    return b"".join(
        (
            _HEAD.pack(_FIRST + used, width),
            *(encode_number(each) for each in heads),
            encode_ids(update.rows),
            encode_numbers(counts) if update.users > 1 else b"",
            *payload,
        )
    )


def decode_factored(data: bytes, *, items: int, width: int) -> FactoredRows:
    """The update in ``data``, for a matrix of ``items`` rows and ``width`` columns; 0: of as many
    as it names.

    Memory is at most a small multiple of ``len(data)``. Raises ``WireError``: ``truncated``,
    ``bad-format``, ``bad-columns``, ``bad-rows``, ``bad-users``, ``bad-values``, ``bad-length``.
    """
    if len(data) < _HEAD.size:
        raise WireError("truncated", f"{len(data)} bytes are too few for an update")
    code, announced = _HEAD.unpack_from(data)
    value_format = _FORMATS.get(code)
    if value_format is None:
        raise WireError("bad-format", f"value format {code} is unknown")
    width = width or announced
    if announced != width or not 1 <= width <= MAX_WIDTH:
        raise WireError("bad-columns", f"the update is of width {announced}, expected {width}")
    heads, offset = [], _HEAD.size
    for _ in range(4):
        number, offset = decode_number(data, offset)
        heads.append(number)
    k, users, height, count = heads
    if not 1 <= k <= width:
        raise WireError("bad-columns", f"{k} columns were trained; expected 1 to {width}")
    if users > MOST_USERS or height > min(users, width):
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
    factor = decode_values(data, split, (height, width), value_format)
    return FactoredRows(rows, np.ascontiguousarray(pulls.T), factor, counts, users, k, width)


# Many updates at once, as an aggregator has them: what numpy costs a call is paid once for all.


def decode_factored_each(
    bodies: Sequence[bytes], *, items: int, width: int
) -> list[FactoredRows | WireError]:
    """Each of ``bodies`` as :func:`decode_factored` has it, an error in the place of a bad one.

    Those of one user are read together; their arrays are views of common ones, and read-only.
    """
    found: list[FactoredRows | WireError | None] = [None] * len(bodies)
    alike: dict[tuple[int, int], list[_OfOne]] = {}
    for place, body in enumerate(bodies):
        if (one := _of_one(place, body, width)) is not None:
            alike.setdefault((body[0], one.width), []).append(one)
    for (code, columns), group in alike.items():
        try:
            _read_together(group, bodies, _FORMATS[code], (items, columns), found)
        except WireError:
            continue  # one of them is bad: each is read by itself
    return the_rest_apart(found, bodies, partial(decode_factored, items=items, width=width))


class _OfOne(NamedTuple):
    """Where the parts of one user's body lie. The length of the ids, which nothing announces, is
    what the others leave."""

    place: int
    k: int
    rows: int
    width: int
    ids: int
    pulls: int
    factor: int


def _of_one(place: int, body: bytes, width: int) -> _OfOne | None:
    """If the parts can be told apart; what is in them is not looked at."""
    value_format = _FORMATS.get(body[0]) if len(body) > _HEAD.size else None
    if value_format is None:
        return None
    try:
        k, offset = decode_number(body, _HEAD.size)
        if body[offset : offset + 2] != b"\1\1":
            return None
        rows, offset = decode_number(body, offset + 2)
    except WireError:
        return None
    announced = body[1] | body[2] << 8
    factor = len(body) - value_bytes((1, announced), value_format)
    pulls = factor - value_bytes((1, rows), value_format)
    sound = announced == (width or announced) and 1 <= k <= announced <= MAX_WIDTH
    if not sound or not rows or pulls - offset < rows:
        return None
    return _OfOne(place, k, rows, announced, offset, pulls, factor)


def _read_together(
    group: Sequence[_OfOne],
    bodies: Sequence[bytes],
    value_format: ValueFormat,
    shape: tuple[int, int],
    found: list[FactoredRows | WireError | None],
) -> None:
    """Put what ``group`` holds, bodies of one format and width, into its places. Raises
    ``WireError`` where one of them is bad."""
    items, width = shape
    counts = [each.rows for each in group]
    ids = [bodies[each.place][each.ids : each.pulls] for each in group]
    rows = ids_of_each(b"".join(ids), counts, [len(each) for each in ids], items)
    # Rows of one value each, with the scale of the row that they are in.
    scale = value_bytes((1, 0), value_format)
    raw = [bodies[each.place][each.pulls : each.factor] for each in group]
    scales = b"".join([each[:scale] * count for each, count in zip(raw, counts, strict=True)])
    data = scales + b"".join([each[scale:] for each in raw])
    pulls = decode_values(data, 0, (len(rows), 1), value_format)
    raw = [bodies[each.place][each.factor :] for each in group]
    data = b"".join([each[:scale] for each in raw]) + b"".join([each[scale:] for each in raw])
    factors = decode_values(data, 0, (len(group), width), value_format)
    ones = np.ones(len(rows), dtype=np.int64)
    for array in (rows, pulls, factors, ones):
        array.setflags(write=False)
    for place, (each, end) in enumerate(zip(group, accumulate(counts), strict=True)):
        mine = slice(end - each.rows, end)
        factor = factors[place : place + 1]
        found[each.place] = FactoredRows(
            rows[mine], pulls[mine], factor, ones[mine], 1, each.k, width
        )
