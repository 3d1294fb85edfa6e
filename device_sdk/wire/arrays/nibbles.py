"""Rows of codes in four bits each: two to a byte, the first in the lower half.

A row of an odd number of codes ends with four zero bits, so that each row starts on a byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.codec.errors import WireError

__all__ = ["pack_rows", "row_bytes", "unpack_rows"]


def row_bytes(columns: int) -> int:
    """Bytes of a row of ``columns`` codes."""
    return -(-columns // 2)


def pack_rows(codes: NDArray[np.int8]) -> bytes:
    """The bytes of int8 [rows, columns]; codes are -8 to 7."""
    rows, columns = codes.shape
    halves = np.zeros((rows, 2 * row_bytes(columns)), dtype=np.uint8)
    halves[:, :columns] = codes.view(np.uint8) & 15
    packed: NDArray[np.uint8] = halves[:, 0::2] | halves[:, 1::2] << np.uint8(4)
    return packed.tobytes()


def unpack_rows(data: bytes | memoryview, rows: int, columns: int) -> NDArray[np.int8]:
    """int8 [rows, columns], of exactly ``rows * row_bytes(columns)`` bytes.

    Raises ``WireError("bad-values")`` where what fills up an odd row is not zero.
    """
    packed = np.frombuffer(data, dtype=np.uint8).reshape(rows, row_bytes(columns))
    if columns % 2 and (packed[:, -1] > 15).any():
        raise WireError("bad-values", "four bits behind an odd row are not zero")
    codes = np.empty((rows, packed.shape[1], 2), dtype=np.int8)
    signed = packed.view(np.int8)
    # Four bits' sign, in eight: shifting a signed number to the right repeats its sign.
    np.right_shift(np.left_shift(signed, 4), 4, out=codes[:, :, 0])
    np.right_shift(signed, 4, out=codes[:, :, 1])
    return codes.reshape(rows, 2 * packed.shape[1])[:, :columns]
