"""The rows of the item matrix that a round's triples touch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["touched_rows"]

Rows = NDArray[np.int64]


def touched_rows(positive: Rows, negative: Rows, catalogue: int) -> tuple[Rows, Rows, Rows]:
    """The distinct items, increasing, and where each of ``positive`` and ``negative`` lies in them.

    All int64. A table over the catalogue is several times faster than sorting.
    """
    is_touched = np.zeros(catalogue, dtype=np.bool_)
    is_touched[positive] = True
    is_touched[negative] = True
    rows = np.flatnonzero(is_touched)
    place = np.empty(catalogue, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    return rows, place.take(positive), place.take(negative)
