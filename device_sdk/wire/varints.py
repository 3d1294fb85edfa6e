"""Strictly increasing ids as variable-length gaps; many of them are parsed without a loop."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.errors import WireError

_MOST_BYTES = 5
LARGEST_ID = 2**31 - 1

_FEW = 256


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
    if count <= _FEW:
        return _decode_few(data, offset, count, bound)
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
    ids = np.cumsum(gaps + 1) - 1
    # Gaps are below 2^35 and counts below 2^28 (ids do not fit a message otherwise): no overflow.
    if int(ids[-1]) >= bound:
        raise WireError("bad-rows", f"an id is not below {bound}")
    return ids, offset + used


def _decode_few(data: bytes, offset: int, count: int, bound: int) -> tuple[NDArray[np.int64], int]:
    """The same for few ids, where numpy's calls cost more than the work."""
    ids: list[int] = []
    last = -1
    end = len(data)
    for _ in range(count):
        gap = shift = 0
        while True:
            if offset >= end:
                raise WireError("bad-rows", "the ids are cut short")
            byte = data[offset]
            offset += 1
            if byte < 128:
                break
            gap |= (byte & 127) << shift
            shift += 7
            if shift >= 7 * _MOST_BYTES:
                raise WireError("bad-rows", "an id is not in its shortest form")
        if shift and not byte:
            raise WireError("bad-rows", "an id is not in its shortest form")
        last += 1 + (gap | byte << shift)
        ids.append(last)
    if last >= bound:
        raise WireError("bad-rows", f"an id is not below {bound}")
    return np.array(ids, dtype=np.int64), offset
