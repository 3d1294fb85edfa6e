"""Strictly increasing ids as variable-length gaps, parsed without a Python loop."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.errors import WireError

_MOST_BYTES = 5
LARGEST_ID = 2**31 - 1


def encode_ids(ids: NDArray[np.int64]) -> bytes:
    """The first id, then each gap minus one; LEB128: seven bits a byte, lowest first.

    Raises ValueError unless ``ids`` is one-dimensional, strictly increasing, within 0 to 2^31 - 1.
    """
    if ids.ndim != 1 or (
        ids.size and (ids[0] < 0 or ids[-1] > LARGEST_ID or not (ids[1:] > ids[:-1]).all())
    ):
        raise ValueError("ids must be strictly increasing, from 0 to 2^31 - 1")
    out = bytearray()
    previous = -1
    for number in ids.tolist():
        gap = number - previous - 1
        previous = number
        while gap > 127:
            out.append(gap & 127 | 128)
            gap >>= 7
        out.append(gap)
    return bytes(out)


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
