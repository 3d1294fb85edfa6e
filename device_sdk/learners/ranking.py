"""Recommendation from the last item matrix, on the device and offline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ranked", "rank_items"]


@dataclass(frozen=True, slots=True)
class Ranked:
    """One recommended item: its row in the catalogue, and its score."""

    row: int
    score: float


def rank_items(
    user: NDArray[np.float32], items: NDArray[Any], seen: NDArray[np.int64], count: int
) -> list[Ranked]:
    """The ``count`` best unseen items of one user, best first (the patent, step 5).

    All K columns take part, whatever number of them this device trains.

    Args:
        user: the user's vector, float32 [K].
        items: the item matrix, float32 or float16 [items, K].
        seen: item rows to leave out: what the user already interacted with.
        count: at most so many are returned; fewer where the catalogue has no more.

    Raises ValueError for a negative count or shapes that do not fit.
    """
    if count < 0:
        raise ValueError(f"count is {count}; expected at least 0")
    if user.ndim != 1 or items.ndim != 2 or items.shape[1] != len(user):
        raise ValueError(
            f"a user's vector of shape {user.shape} does not fit items of shape {items.shape}; "
            "expected [K] and [items, K]"
        )
    scores = items.astype(np.float32, copy=False) @ user
    scores[seen] = -np.inf
    unseen = np.flatnonzero(scores > -np.inf)
    # Ties go to the lower row, so that the same state always gives the same list.
    best = unseen[np.argsort(-scores[unseen], kind="stable")[:count]]
    return [Ranked(int(row), float(scores[row])) for row in best]
