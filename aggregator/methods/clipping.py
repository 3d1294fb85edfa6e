"""Bounds how far a single device can move the model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["clip_factor"]


def clip_factor(values: NDArray[Any], limit: float) -> float:
    """The factor, at most 1, that brings the Euclidean norm of ``values`` down to ``limit``.

    ``limit`` 0 means no limit. The norm is taken in float64: squares of finite float32 values
    cannot overflow there.
    """
    if limit == 0 or values.size == 0:
        return 1.0
    flat = values.reshape(-1).astype(np.float64)
    norm = math.sqrt(float(flat @ flat))
    return 1.0 if norm <= limit else limit / norm
