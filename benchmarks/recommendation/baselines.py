"""Recommendation by who sees everybody's data: popularity, EASE (Steck, WWW 2019), and iALS (Hu,
Koren and Volinsky, ICDM 2008).

All are given as vectors of users and items whose product is the score, so that they are measured by
the same code as a fleet's factorisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from benchmarks.recommendation.metrics import Floats
from benchmarks.recommendation.split import LeaveOneOut, Rows

Doubles = NDArray[np.float64]
SWEEPS = 15
"""Of iALS, unless told otherwise."""


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
    _require_positive(penalty)
    taken: Doubles = np.zeros((split.users, split.items))
    for user, rows in enumerate(split.train):
        taken[user, rows] = 1
    inverse = np.linalg.inv(taken.T @ taken + penalty * np.eye(split.items))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    return taken.astype(np.float32), np.ascontiguousarray(weights.T, dtype=np.float32)


def ials(
    split: LeaveOneOut, penalty: float, alpha: float, rng: np.random.Generator, width: int = 64
) -> tuple[Floats, Floats]:
    """A factorisation after ``SWEEPS`` of :func:`ials_sweeps`: users float32 [users, width], items
    float32 [items, width].
    """
    sweeps = ials_sweeps(split, penalty, alpha, rng, width)
    users, items = next(islice(sweeps, SWEEPS - 1, None))
    return users.astype(np.float32), items.astype(np.float32)


def ials_sweeps(
    split: LeaveOneOut, penalty: float, alpha: float, rng: np.random.Generator, width: int
) -> Iterator[tuple[Doubles, Doubles]]:
    """Users [users, width] and items [items, width] after each sweep of alternating least squares.

    Each half of a sweep is the minimum over all users, or all items, with the others held, of

        sum over all pairs of c (x - u.v)^2 + penalty (|U|^2 + |V|^2),

    x = 1 and c = 1 + alpha where the user took the item, x = 0 and c = 1 elsewhere. The first items
    are normal with standard deviation 0.1. Raises ValueError unless ``penalty`` is above 0.
    """
    _require_positive(penalty)
    taken = np.concatenate(split.train)
    takers = np.repeat(np.arange(split.users), [len(rows) for rows in split.train])
    order = np.argsort(taken, kind="stable")
    bounds = np.searchsorted(taken[order], np.arange(1, split.items))
    by_item = np.split(takers[order], bounds)
    items: Doubles = rng.normal(0, 0.1, (split.items, width))
    while True:
        users = _least_squares(split.train, items, penalty, alpha)
        items = _least_squares(by_item, users, penalty, alpha)
        yield users, items


def _least_squares(own: Sequence[Rows], others: Doubles, penalty: float, alpha: float) -> Doubles:
    """The best vector for each of ``own``, the rows of ``others`` that it goes with."""
    shared = others.T @ others + penalty * np.eye(others.shape[1])
    found: Doubles = np.empty((len(own), others.shape[1]))
    for place, rows in enumerate(own):
        near = others[rows]
        inner = shared + alpha * (near.T @ near)
        found[place] = np.linalg.solve(inner, (1 + alpha) * near.sum(axis=0))
    return found


def _require_positive(penalty: float) -> None:
    if penalty <= 0:
        raise ValueError(f"penalty is {penalty}; expected above 0")
