"""Bounds how far a single device can move the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Measured",
    "bounded_rows",
    "clip_factor",
    "euclidean_norm",
    "measured",
    "row_sizes",
]

Floats = NDArray[np.float64]
Squares = NDArray[np.float32] | NDArray[np.float64]

_SHORT = 4096
"""Values of a row whose float32 sum is good to four digits: limits are multiples of what is
usual."""


def clip_factor(values: NDArray[Any], limit: float) -> float:
    """The factor, at most 1, that brings the Euclidean norm of ``values`` down to ``limit``.

    ``limit`` 0 means no limit. The norm is taken in float64: squares of finite float32 values
    cannot overflow there.
    """
    if limit == 0 or values.size == 0:
        return 1.0
    norm = euclidean_norm(values)
    return 1.0 if norm <= limit else limit / norm


def euclidean_norm(values: NDArray[Any]) -> float:
    """The norm of all of ``values``, taken in float64."""
    flat = values.reshape(-1).astype(np.float64)
    return math.sqrt(float(flat @ flat))


@dataclass(frozen=True, slots=True)
class Measured:
    """How large an update [rows, columns] is. ``norm`` is Euclidean, over all values.

    A row's size is its root mean square: comparable whatever the number of columns.
    """

    norm: float
    columns: int
    squares: Squares
    """Sums of squares [rows]."""

    @property
    def rows(self) -> Floats:
        """Sizes of the rows, float64 [rows]."""
        sizes: Floats = np.sqrt(self.squares.astype(np.float64) / max(1, self.columns))
        return sizes

    @property
    def largest_row(self) -> float:
        """The largest row's size; 0 without rows."""
        return self._size(float(self.squares.max())) if len(self.squares) else 0.0

    @property
    def median_row(self) -> float:
        """The median row's size, the lower of two in the middle; 0 without rows."""
        if not len(self.squares):
            return 0.0
        middle = (len(self.squares) - 1) // 2
        # A fifth of what numpy's median takes for the few rows of an update.
        return self._size(float(np.partition(self.squares, middle)[middle]))

    def _size(self, squares: float) -> float:
        return math.sqrt(squares / max(1, self.columns))


def measured(values: NDArray[np.float32]) -> Measured:
    """How large ``values`` [rows, columns] are.

    Squares are summed in float32, which holds those of a million values as large as may be
    accepted; where rows are long, in float64, which keeps the small ones.
    """
    if values.shape[1] <= _SHORT:
        squares: Squares = np.einsum("ij,ij->i", values, values)
    else:
        squares = np.einsum("ij,ij->i", values, values, dtype=np.float64)
    norm = math.sqrt(float(squares.sum(dtype=np.float64)))
    return Measured(norm, values.shape[1], squares)


def row_sizes(values: NDArray[Any]) -> Floats:
    """Root mean square of each row, float64 [rows]: comparable whatever the number of columns."""
    wide = values.astype(np.float64)
    sizes: Floats = np.sqrt(np.einsum("ij,ij->i", wide, wide) / max(1, values.shape[1]))
    return sizes


def bounded_rows(
    values: NDArray[np.float32], sizes: Floats, limit: float
) -> tuple[NDArray[np.float32], int]:
    """``values`` [rows, columns] with rows above ``limit`` scaled down to it, and how many were.

    ``sizes`` are the rows' :func:`row_sizes`.
    """
    large = sizes > limit
    count = int(np.count_nonzero(large))
    if not count:
        return values, 0
    scale = np.ones(len(sizes), dtype=np.float32)
    scale[large] = (limit / sizes[large]).astype(np.float32)
    return values * scale[:, None], count
