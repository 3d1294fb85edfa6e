"""Float rows as codes of eight or four bits with a scale each, rounded stochastically (unbiased).

A scale is stored as the upper 16 bits of a float32 (bfloat16), rounded up: the range of float32 in
two bytes, for a quantisation step at most 0.8 % coarser. That holds for four bits as well: a row of
64 codes takes 32 bytes, and a byte less for its scale would save 3 % at the cost of range.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.codec.errors import WireError

LEAST_SCALE = 1e-30
LARGEST_VALUE = 1e12
"""Values above are refused on both ends: no model that trains has any."""
EIGHT_BITS = 127
"""The largest code of eight bits; -128 is not used."""
FOUR_BITS = 7
"""The largest code of four bits; -8 is not used."""
# Little-endian wherever this runs: the upper half of a float is the second one.
_HALF, _FLOAT32 = np.dtype("<u2"), np.dtype("<f4")
_LARGEST_SCALES = {code: LARGEST_VALUE / code * 1.01 for code in (EIGHT_BITS, FOUR_BITS)}
# As bfloat16: the least one that is not below LEAST_SCALE, and the largest not above the largest
# scale.
_LEAST_BITS = (int(np.float32(LEAST_SCALE).view(np.uint32)) + 0xFFFF) >> 16
_LARGEST_BITS = {
    code: int(np.float32(scale).view(np.uint32)) >> 16 for code, scale in _LARGEST_SCALES.items()
}
_UNUSED = {code: (255 - code).to_bytes(1, "little") for code in _LARGEST_SCALES}
"""The code below the least, as a byte."""


def quantise(
    values: NDArray[np.float32], rng: np.random.Generator, largest_code: int = EIGHT_BITS
) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """Scales (bfloat16 bits, [rows]) and codes (int8 up to ``largest_code``, [rows, columns]).

    Each code is floor(value / scale + u) with u uniform in [0, 1), so its mean is the value; scale
    = largest magnitude of the row / ``largest_code``, rounded up. A row whose scale would be below
    1e-30 becomes zero. ``largest_code``: ``EIGHT_BITS`` or ``FOUR_BITS``. Raises ValueError for
    values that are not finite or above 1e12.
    """
    check_values(values)
    largest = np.abs(values).max(axis=1, initial=0.0).astype(np.float32)
    raw = (largest / np.float32(largest_code)).view(np.uint32)
    scales = ((raw.astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)
    scales[scale_values(scales) < LEAST_SCALE] = 0
    divisors = scale_values(scales)
    divisors[divisors == 0] = np.inf
    draws = rng.random(values.shape, dtype=np.float32)
    codes = np.floor(values / divisors[:, None] + draws)
    # The largest code plus a draw just below 1 may round to the next integer in float32.
    return scales, np.clip(codes, -largest_code, largest_code).astype(np.int8)


def dequantise(
    scales: NDArray[np.uint16], codes: NDArray[np.int8], largest_code: int = EIGHT_BITS
) -> NDArray[np.float32]:
    """float32 [rows, columns]. Raises ``WireError("bad-values")`` unless scales are 0 or sane.

    Also refused: the code below minus ``largest_code``, which the encoder never writes, and a code
    other than 0 in a row of scale 0: the same values would have two encodings.
    """
    # A third of the cost of finding the least.
    codes_used = _UNUSED[largest_code] not in codes.tobytes()
    factors = scale_values(scales)
    # Positive floats are in the order of their bits, negative ones and NaN lie above: that settles
    # the common case. To find a place costs a quarter of finding a value.
    if (
        codes_used
        and scales.size
        and int(scales[scales.argmin()]) >= _LEAST_BITS
        and int(scales[scales.argmax()]) <= _LARGEST_BITS[largest_code]
    ):
        return codes * factors[:, None]
    most = _LARGEST_SCALES[largest_code]
    usable = (factors == 0) | ((factors >= LEAST_SCALE) & (factors <= most))
    if not usable.all():  # NaN and negative numbers fail the comparisons too
        raise WireError(
            "bad-values", f"a row's scale is neither 0 nor in {LEAST_SCALE} to {most:.1g}"
        )
    # Minus zero compares equal to zero: look at the bits.
    if (scales == 0x8000).any():
        raise WireError("bad-values", "a row's scale is minus zero")
    if not codes_used:
        raise WireError("bad-values", f"code {-largest_code - 1} is not used")
    silent = factors == 0
    if silent.any() and codes[silent].any():
        raise WireError("bad-values", "a row of scale 0 holds codes other than 0")
    return codes * factors[:, None]


def scale_values(scales: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bits, one-dimensional, as float32."""
    halves = np.zeros(2 * len(scales), dtype=_HALF)
    halves[1::2] = scales
    return halves.view(_FLOAT32)


def check_values(values: NDArray[np.floating]) -> None:
    """Raises ValueError unless all values are finite and at most 1e12 in magnitude."""
    # NaN fails the comparison.
    if values.size and not float(np.abs(values).max()) <= LARGEST_VALUE:
        raise ValueError("a value is not finite or exceeds 1e12 in magnitude")
