"""How often the item that was held out is among the first n, of all items not seen in training."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from device_sdk.interactions import Interactions
from examples.datasets.movielens import Split


def hit_rate(split: Split, users: NDArray[np.float32], items: NDArray[np.float32], n: int) -> float:
    """Share of users whose held-out item ranks among the first `n` by users @ items.T.

    `users` float32 [users, k], `items` float32 [items, k].
    """
    return _hit_rate(split, (users @ items.T).astype(np.float64), n)


def popularity_hit_rate(split: Split, n: int) -> float:
    """The same for a ranking by the number of training interactions, equal for everybody."""
    counts = np.bincount(split.train.item, minlength=len(split.train.item_ids))
    scores = np.tile(counts.astype(np.float64), (len(split.train.user_ids), 1))
    return _hit_rate(split, scores, n)


def _hit_rate(split: Split, scores: NDArray[np.float64], n: int) -> float:
    rows = np.arange(len(split.test_item))
    held_out = scores[rows, split.test_item][:, None]
    _hide_seen(scores, split.train)
    # Ties count against the held-out item, except with itself.
    better = (scores >= held_out).sum(axis=1) - 1
    return float((better < n).mean())


def _hide_seen(scores: NDArray[np.float64], train: Interactions) -> None:
    scores[train.user, train.item] = -np.inf
