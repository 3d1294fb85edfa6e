"""Where a held-out item stands among others, and what that is worth: leave-one-out ranking.

The protocol of He et al. 2017 (Neural collaborative filtering): one relevant item a user, ranked
among 99 drawn ones or among all that the user has not touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Floats = NDArray[Any]

CUTOFF = 10
NEGATIVES = 99


def sampled_rank(user: Floats, items: Floats, target: int, others: Rows) -> int:
    """Rank from 0 (best) of item ``target`` among ``others`` for the vector ``user``.

    ``user`` float [K], ``items`` float [items, K], ``others`` rows without ``target``. Ties count
    against the target, so that a constant score finds nothing. Scores must be finite: NaN would
    compare as a hit.
    """
    scores = _scores(items[np.append(others, target)], user)
    return int(np.count_nonzero(scores[:-1] >= scores[-1]))


def full_rank(user: Floats, items: Floats, target: int, seen: Rows) -> int:
    """As :func:`sampled_rank`, among all items outside ``seen``, the user's training items."""
    scores = _scores(items, user)
    wanted = scores[target]
    scores[seen] = -np.inf
    scores[target] = -np.inf
    return int(np.count_nonzero(scores >= wanted))


def _scores(items: Floats, user: Floats) -> Floats:
    """Each row by itself: a matrix product rounds by place, and equal rows would not tie."""
    scores: Floats = np.einsum("ik,k->i", items, user)
    return scores


def gains(ranks: Rows, cutoff: int = CUTOFF) -> NDArray[np.float64]:
    """What each rank adds to NDCG: 1 / log2(rank + 2) in the first ``cutoff``, else 0.

    With one relevant item the ideal is 1. A rank is a hit where its gain is above 0.
    """
    return np.where(ranks < cutoff, 1 / np.log2(ranks + 2.0), 0.0)


def draw_negatives(items: int, touched: Rows, rng: np.random.Generator) -> Rows:
    """99 distinct item rows outside ``touched``, or all of them where there are fewer.

    ``touched``: the user's training items and the held-out one.
    """
    outside = np.ones(items, dtype=np.bool_)
    outside[touched] = False
    found = np.flatnonzero(outside)
    return found if len(found) <= NEGATIVES else rng.choice(found, size=NEGATIVES, replace=False)
