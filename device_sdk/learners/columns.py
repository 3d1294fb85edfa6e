"""Which columns of the factor matrices a device trains this round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_columns", "left_out"]


def draw_columns(total: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` of ``total`` columns, increasing; all of them where ``count`` reaches ``total``.

    Drawn afresh each round, so that a device with few columns still reaches all of its vector.
    (The patent's "feature filter layer", its steps 2 and 3.)
    """
    if count >= total:
        return np.arange(total, dtype=np.int64)
    return np.sort(rng.choice(total, size=count, replace=False)).astype(np.int64)


def left_out(total: int, columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The columns that are not in ``columns``, increasing."""
    out = np.ones(total, dtype=np.bool_)
    out[columns] = False
    return np.flatnonzero(out)
