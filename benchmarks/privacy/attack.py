"""Attacks of a curious aggregator on a device's list of likes.

It keeps to the protocol and knows what an aggregator knows: every update in clear, whose it is, the
item matrix of each round, all settings; and how popular each item is, which it can count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.privacy.sighting import Sighting

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

_STEPS = 25
_SETTLED = 1e-3
_RIDGE = 1e-4
_FAR = 5.0


def liked_by_size(sighting: Sighting, weight: float) -> Rows:
    """The rows of one update that look liked and are too large for a pseudo-item's.

    Nothing is learnt: liked rows of a new user are all of one size, pseudo-items' ``weight`` times
    that, and the cut is half way between, on a logarithmic scale. Where pseudo-items weigh as much,
    every row that looks liked is taken.
    """
    cut = np.sqrt(weight) if weight < 1 else 0.0
    return sighting.rows[sighting.liking > cut]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What a device's updates say about each row that they name: ``features`` [r, f]."""

    rows: Rows
    features: Floats


def evidence(seen: Sequence[Sighting], popularity: Floats) -> Evidence:
    """Put one device's updates together, however many.

    ``popularity``: float64 [items], that of each item among *other* devices.
    """
    items, count = len(popularity), len(seen)
    liking = np.zeros((count, items))
    named = np.zeros((count, items), dtype=np.bool_)
    score = np.zeros(items)
    for place, one in enumerate(seen):
        liking[place, one.rows] = one.liking
        named[place, one.rows] = True
        score += one.score
    rows = np.flatnonzero(named.any(axis=0))
    liking, named = liking[:, rows], named[:, rows]
    times = named.sum(axis=0)
    mean = liking.sum(axis=0) / times
    least = np.where(named, liking, np.inf).min(axis=0)
    features = [
        np.clip(mean, -2, 2),
        np.log(np.maximum(np.abs(mean), 1e-3)),
        np.log1p(popularity[rows]),
        _standard(score[rows]),
    ]
    if count > 1:
        features += [np.clip(least, -2, 2), times / count, np.clip(liking[-1], -2, 2)]
    return Evidence(rows, np.stack(features, axis=1))


class LikesModel:
    """Logistic regression on the evidence, its squares and its products.

    It is trained on devices whose likes are known: an aggregator may run some of its own, or
    simulate a fleet on public data.
    """

    def __init__(self, known: Sequence[tuple[Evidence, NDArray[np.bool_]]]) -> None:
        """``known``: for each device its evidence, and for each of its rows whether it is liked."""
        raw = np.concatenate([one.features for one, _ in known])
        self._middle, self._width = raw.mean(axis=0), raw.std(axis=0) + 1e-9
        features = self._expanded(raw)
        liked = np.concatenate([truth for _, truth in known]).astype(np.float64)
        self._weights = np.zeros(features.shape[1])
        ridge = _RIDGE * len(features)

        def loss(weights: Floats) -> float:
            logits = features @ weights
            fit = np.logaddexp(0, logits) - liked * logits
            return float(fit.sum() + ridge / 2 * weights @ weights)

        for _ in range(_STEPS):
            chance = _logistic(features @ self._weights)
            curvature = features.T @ (features * (chance * (1 - chance))[:, None])
            slope = features.T @ (liked - chance) - ridge * self._weights
            step = np.linalg.solve(curvature + ridge * np.eye(len(slope)), slope)
            # Newton's step overshoots where some chances are near 0 or 1.
            while loss(self._weights + step) > loss(self._weights) and np.abs(step).max() > 1e-6:
                step /= 2
            self._weights += step
            if np.abs(step).max() < _SETTLED:
                break

    def chances(self, found: Evidence) -> Floats:
        """For each row, how likely it is that it is liked, [r]."""
        return _logistic(self._expanded(found.features) @ self._weights)

    def _expanded(self, raw: Floats) -> Floats:
        scaled = np.clip((raw - self._middle) / self._width, -_FAR, _FAR)
        first, second = np.triu_indices(scaled.shape[1])
        products = scaled[:, first] * scaled[:, second]
        return np.concatenate([np.ones((len(scaled), 1)), scaled, products], axis=1)


def _logistic(values: Floats) -> Floats:
    clipped: Floats = np.clip(values, -30, 30)
    return np.asarray(1 / (1 + np.exp(-clipped)), dtype=np.float64)


def _standard(values: Floats) -> Floats:
    return (values - values.mean()) / (values.std() + 1e-12)
