"""Float rows as int8 with a scale each, rounded stochastically (unbiased).

A scale is stored as the upper 16 bits of a float32 (bfloat16), rounded up: the range of float32 in
two bytes, for a quantisation step at most 0.8 % coarser.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.errors import WireError

LEAST_SCALE = 1e-30
LARGEST_VALUE = 1e12
"""Values above are refused on both ends: no model that trains has any."""
_LARGEST_SCALE = LARGEST_VALUE / 127 * 1.01
# As bfloat16: the least one that is not below LEAST_SCALE, the largest not above _LARGEST_SCALE.
_LEAST_BITS = (int(np.float32(LEAST_SCALE).view(np.uint32)) + 0xFFFF) >> 16
_MOST_BITS = int(np.float32(_LARGEST_SCALE).view(np.uint32)) >> 16


def quantise(
    values: NDArray[np.float32], rng: np.random.Generator
) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """Scales (bfloat16 bits, [rows]) and codes (int8 in -127..127, [rows, columns]).

    Each code is floor(value / scale + u) with u uniform in [0, 1), so its mean is the value; scale
    = largest magnitude of the row / 127, rounded up. A row whose scale would be below 1e-30 becomes
    zero. Raises ValueError for values that are not finite or above 1e12.
    """
    check_values(values)
    largest = np.abs(values).max(axis=1, initial=0.0).astype(np.float32)
    raw = (largest / np.float32(127)).view(np.uint32)
    scales = ((raw.astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)
    scales[scale_values(scales) < LEAST_SCALE] = 0
    divisors = scale_values(scales)
    divisors[divisors == 0] = np.inf
    draws = rng.random(values.shape, dtype=np.float32)
    codes = np.floor(values / divisors[:, None] + draws)
    # 127 plus a draw just below 1 may round to 128 in float32.
    return scales, np.clip(codes, -127, 127).astype(np.int8)


def dequantise(scales: NDArray[np.uint16], codes: NDArray[np.int8]) -> NDArray[np.float32]:
    """float32 [rows, columns]. Raises ``WireError("bad-values")`` unless scales are 0 or sane.

    Also refused: code -128, which the encoder never writes, and a code other than 0 in a row of
    scale 0: the same values would have two encodings.
    """
    factors = scale_values(scales)
    codes_used = not codes.size or int(codes.min()) != -128
    # Positive floats are in the order of their bits: two comparisons settle the common case.
    if (
        codes_used
        and scales.size
        and int(scales.min()) >= _LEAST_BITS
        and int(scales.max()) <= _MOST_BITS
    ):
        return codes * factors[:, None]
    usable = (factors == 0) | ((factors >= LEAST_SCALE) & (factors <= _LARGEST_SCALE))
    if not usable.all():  # NaN and negative numbers fail the comparisons too
        raise WireError("bad-values", f"a row's scale is neither 0 nor in {LEAST_SCALE} to 1e10")
    # Minus zero compares equal to zero: look at the bits.
    if (scales == 0x8000).any():
        raise WireError("bad-values", "a row's scale is minus zero")
    if not codes_used:
        raise WireError("bad-values", "code -128 is not used")
    silent = factors == 0
    if silent.any() and codes[silent].any():
        raise WireError("bad-values", "a row of scale 0 holds codes other than 0")
    return codes * factors[:, None]


def scale_values(scales: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bits as float32."""
    return (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)


def check_values(values: NDArray[np.floating]) -> None:
    """Raises ValueError unless all values are finite and at most 1e12 in magnitude."""
    # NaN fails the comparison.
    if values.size and not float(np.abs(values).max()) <= LARGEST_VALUE:
        raise ValueError("a value is not finite or exceeds 1e12 in magnitude")
