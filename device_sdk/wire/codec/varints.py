"""Strictly increasing ids as variable-length gaps; parsed without a loop."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
    return b"".join(encode_number(gap) for gap in gaps.tolist())


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
