"""Recommendation without training: how often an item was taken, and EASE (Steck, WWW 2019).

Both are given as vectors of users and items whose product is the score, so that they are measured
by the same code as a factorisation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.recommendation.metrics import Floats
from benchmarks.recommendation.split import LeaveOneOut


def popularity(split: LeaveOneOut) -> tuple[Floats, Floats]:
    """Every item's count in training, the same for all: users float32 [users, 1], items [items, 1].

    Counts are exact in float32 up to 2^24.
    """
    counts = np.bincount(np.concatenate(split.train), minlength=split.items)
    return np.ones((split.users, 1), dtype=np.float32), counts.astype(np.float32)[:, None]


def ease(split: LeaveOneOut, penalty: float) -> tuple[Floats, Floats]:
    """The closed form of EASE: users float32 [users, items], items float32 [items, items].

    With X the users' 0/1 rows of training items, P = (X'X + penalty I)^-1 and B_ij = -P_ij / P_jj
    off the diagonal, 0 on it: a user's scores are x B. Users are X, items are B transposed. Raises
    ValueError unless ``penalty`` is above 0.
    """
    if penalty <= 0:
        raise ValueError(f"penalty is {penalty}; expected above 0")
    taken: NDArray[np.float64] = np.zeros((split.users, split.items))
    for user, rows in enumerate(split.train):
        taken[user, rows] = 1
    inverse = np.linalg.inv(taken.T @ taken + penalty * np.eye(split.items))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    return taken.astype(np.float32), np.ascontiguousarray(weights.T, dtype=np.float32)
