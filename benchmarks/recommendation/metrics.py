"""HR@n and NDCG@n of one relevant item a user."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.recommendation.split import LeaveOneOut
from device_sdk.evaluation.metrics import CUTOFF, full_rank, gains, sampled_rank

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Quality:
    """``hit_ratio``: share of users whose item is in the first n. ``ndcg``: mean of
    1 / log2(rank + 2) there, 0 elsewhere, with ranks from 0 (one relevant item: the ideal is 1).
    """

    hit_ratio: float
    ndcg: float


def quality(ranks: Rows, n: int = CUTOFF) -> Quality:
    """Quality of these ranks (int64 [users], 0 is best) at a cut-off of ``n``."""
    return Quality(float((ranks < n).mean()), float(gains(ranks, n).mean()))


def sampled_ranks(users: Floats, items: Floats, split: LeaveOneOut) -> Rows:
    """Rank of each user's held-out item among its given negatives, int64 [users].

    Ties count against the held-out item, so that a constant score finds nothing. Raises ValueError
    for scores that are not finite: NaN would compare as a hit.
    """
    _require_finite(users, items)
    ranks = [
        sampled_rank(users[user], items, target, others)
        for user, (target, others) in enumerate(zip(split.held_out, split.negatives, strict=True))
    ]
    return np.array(ranks, dtype=np.int64)


def full_ranks(users: Floats, items: Floats, split: LeaveOneOut) -> Rows:
    """Rank of each held-out item among all items outside the user's training data, int64 [users].

    Ties and errors as for :func:`sampled_ranks`.
    """
    _require_finite(users, items)
    ranks = [
        full_rank(users[user], items, target, split.train[user])
        for user, target in enumerate(split.held_out)
    ]
    return np.array(ranks, dtype=np.int64)


def _require_finite(users: Floats, items: Floats) -> None:
    if not np.isfinite(users).all() or not np.isfinite(items).all():
        raise ValueError("the vectors to evaluate hold values that are not finite")
