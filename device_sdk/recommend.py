"""From scores to recommendations."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def top_items(scores: NDArray[np.float32], seen: ArrayLike, count: int) -> list[tuple[int, float]]:
    """The `count` items of highest score without the `seen` ones, as (row, score), best first.

    `scores` is float [items], `seen` holds item rows. Equal scores keep the order of rows. There
    are fewer where not enough unseen items are left. Raises ValueError for a negative count, scores
    that are no vector or not finite, and rows outside the scores.
    """
    if count < 0:
        raise ValueError(f"count is {count}; expected 0 or more")
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise ValueError(f"expected finite scores [items], got shape {list(scores.shape)}")
    rows = np.asarray(seen, dtype=np.int64).reshape(-1)
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(scores)):
        raise ValueError(f"a seen item lies outside the {len(scores)} scored ones")
    open_ = np.ones(len(scores), np.bool_)
    open_[rows] = False
    candidates = np.flatnonzero(open_)
    best = candidates[np.argsort(-scores[candidates], kind="stable")[:count]]
    return [(int(row), float(scores[row])) for row in best]
