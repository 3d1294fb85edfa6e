"""Coordinate-wise robust means: no minority of devices decides a coordinate.

Source: Yin et al. 2018, "Byzantine-robust distributed learning: towards optimal statistical rates",
definitions 1 (median) and 2 (trimmed mean).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = ["Robust", "RobustRule", "require_multiple", "touched_sums"]

Robust = Literal["none", "trimmed", "median"]
Floats = NDArray[np.float64]

_SIGN = np.uint32(1 << 31)
_ALL = np.uint32(0xFFFFFFFF)
_LOW = np.uint64(0xFFFFFFFF)
_BLOCK = 1 << 16
"""Coordinates of dense vectors that are sorted at a time."""


@dataclass(frozen=True, slots=True)
class RobustRule:
    """``none`` is the mean. ``trimmed`` leaves out the share ``trim_share`` of the values at either
    end, rounded down. ``median`` is the middle value, or the mean of the middle two.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    robust: Robust = "none"
    trim_share: float = 0.1

    def __post_init__(self) -> None:
        if self.robust not in get_args(Robust):
            known = ", ".join(repr(one) for one in get_args(Robust))
            raise ValueError(f"robust is {self.robust!r}; expected one of {known}")
        share = self.trim_share
        if isinstance(share, bool) or not math.isfinite(share) or not 0 <= share < 0.5:
            raise ValueError(
                f"trim_share is {share}; expected 0 to below 0.5, the share left out at either end"
            )

    @property
    def holds(self) -> bool:
        """Whether the round's updates must be kept until it closes."""
        return self.robust != "none"

    def cut(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of ``counts`` values are left out at either end."""
        if self.robust == "median":
            middle: NDArray[np.int64] = (counts - 1) // 2
            return middle
        share = self.trim_share if self.robust == "trimmed" else 0.0
        # A tenth of ten is one, whatever binary fractions make of it.
        return np.asarray(np.floor(counts * share + 1e-9), dtype=np.int64)

    def mean(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """The robust mean over the first axis of [devices, size], all devices alike: [size]."""
        devices = len(vectors)
        cut = int(self.cut(np.asarray([devices]))[0])
        parts = [
            np.sort(vectors[:, start : start + _BLOCK], axis=0)[cut : devices - cut].mean(
                axis=0, dtype=np.float64
            )
            for start in range(0, vectors.shape[1], _BLOCK)
        ]
        return np.concatenate(parts).astype(np.float32)


def require_multiple(name: str, value: float) -> None:
    """Raises ValueError unless a multiple of the median is 0 (off) or at least 1."""
    if isinstance(value, bool) or not math.isfinite(value) or (value != 0 and value < 1):
        raise ValueError(
            f"{name} is {value}; expected 0 (no limit) or a multiple of the median of at least 1"
        )


def touched_sums(
    cells: NDArray[np.int64], values: NDArray[np.float32], size: int, rule: RobustRule
) -> Floats:
    """The robust mean of each cell's values, times their number: float64 [size].

    Args:
        cells: int64 [n], 0 to ``size`` - 1; a cell that occurs often was touched by many.
        values: float32 [n], finite.
        size: number of cells, below 2^32. Cells that nobody touched are 0.
        rule: how the mean is taken.

    The result does not depend on the order of the entries.
    """
    totals = np.zeros(size, dtype=np.float64)
    if not len(cells):
        return totals
    # Sorting numbers that hold cell and value together is several times faster than a lexsort.
    keys = (cells.astype(np.uint64) << np.uint64(32)) | _ordered(values).astype(np.uint64)
    keys.sort()
    cell = (keys >> np.uint64(32)).astype(np.int64)
    value = _restored((keys & _LOW).astype(np.uint32)).astype(np.float64)
    starts = np.flatnonzero(np.concatenate([[True], cell[1:] != cell[:-1]]))
    counts = np.diff(np.append(starts, len(cell)))
    cuts = rule.cut(counts)
    place = np.arange(len(cell)) - np.repeat(starts, counts)
    kept = (place >= np.repeat(cuts, counts)) & (place < np.repeat(counts - cuts, counts))
    sums = np.add.reduceat(np.where(kept, value, 0.0), starts)
    totals[cell[starts]] = sums / (counts - 2 * cuts) * counts
    return totals


def _ordered(values: NDArray[np.float32]) -> NDArray[Any]:
    """uint32 that compare as the values do."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return bits ^ np.where(bits & _SIGN, _ALL, _SIGN)


def _restored(ordered: NDArray[Any]) -> NDArray[np.float32]:
    """The inverse of :func:`_ordered`."""
    bits = ordered ^ np.where(ordered & _SIGN, _SIGN, _ALL)
    return bits.view(np.float32)
