"""Uniform draws from the items that a user has not interacted with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Unliked"]

Rows = NDArray[np.int64]


class Unliked:
    """For each local user the items of ``candidates`` outside its own, by rank.

    The items that a user leaves over are never listed: the one of rank r lies behind as many of
    the user's own items as have at most r others before them. So memory is that of the
    interactions, whatever the catalogue's length, and a draw needs no second try.

    Args:
        positives: per local user the distinct item rows of its interactions, all of them among
            ``candidates``.
        catalogue: number of items.
        candidates: increasing item rows to draw from; None stands for the whole catalogue.
    """

    def __init__(
        self, positives: Sequence[Rows], catalogue: int, candidates: Rows | None = None
    ) -> None:
        total = catalogue if candidates is None else len(candidates)
        place: Rows | None = None
        if candidates is not None:
            place = np.zeros(catalogue, dtype=np.int64)
            place[candidates] = np.arange(total)
        own = [np.unique(rows if place is None else place[rows]) for rows in positives]
        lengths = np.array([len(rows) for rows in own], dtype=np.int64)
        self._candidates = candidates
        self._begin = np.cumsum(lengths) - lengths
        # Users' keys are kept apart by a stride that none of their ranks reaches.
        self._stride = total + 1
        keys = [user * self._stride + rows - np.arange(len(rows)) for user, rows in enumerate(own)]
        self._keys = np.concatenate([np.empty(0, dtype=np.int64), *keys])
        self.counts: Rows = total - lengths
        """Per user the number of items to draw from, int64 [users]."""

    def draw(self, users: Rows, rng: np.random.Generator) -> Rows:
        """One item row for each entry of ``users``, int64 like it; none of them may lack any."""
        # The largest random() is 1 - 2**-53, so that no product rounds up to its count.
        rank = (rng.random(len(users)) * self.counts[users]).astype(np.int64)
        passed = np.searchsorted(self._keys, users * self._stride + rank, side="right")
        item = rank + passed - self._begin[users]
        return item if self._candidates is None else self._candidates[item]
