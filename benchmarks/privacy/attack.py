"""What a curious aggregator guesses of a device's likes, and how often it is right."""

from __future__ import annotations

import math
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


Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Victim:
    """A device: what it sent, oldest first, what its users like, and its pseudo-items."""

    seen: Sequence[Sighting]
    likes: Rows
    pseudo: Rows


@dataclass(frozen=True, slots=True)
class Judgement:
    """Means over devices.

    Attributes:
        precision: share of the items said to be liked that are.
        recall: share of the liked items that were said.
        auc: how often a liked item ranks above a pseudo-item: 0.5 for an attack that cannot tell
            them apart, 1 for one that always can; None without pseudo-items, and for attacks that
            do not rank.
    """

    precision: float
    recall: float
    auc: float | None


def by_size(victims: Sequence[Victim], weight: float) -> Judgement:
    """Of the cut by size, on the last update of each."""
    found = [(*_hits(liked_by_size(one.seen[-1], weight), one.likes), math.nan) for one in victims]
    return _mean(found)


def by_learning(victims: Sequence[Victim], popularity: NDArray[np.float64]) -> Judgement:
    """Of the learned attack on all updates of each: trained on one half, judged on the other."""
    known = []
    for one in victims:
        # A device does not add to what is known from others.
        others = popularity.copy()
        others[one.likes] -= 1
        found = evidence(one.seen, np.maximum(others, 0))
        known.append((found, np.isin(found.rows, one.likes)))
    half = len(victims) // 2
    model = LikesModel(known[:half])
    judged = []
    for (found, truth), one in zip(known[half:], victims[half:], strict=True):
        chances = model.chances(found)
        is_pseudo = np.isin(found.rows, one.pseudo) & ~truth
        quality = ranking_quality(chances[truth], chances[is_pseudo])
        judged.append((*_hits(found.rows[chances > 0.5], one.likes), quality))
    return _mean(judged)


def ranking_quality(liked: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """The area under the ROC curve: how often one of ``liked`` is above one of ``others``, ties
    counting half; NaN where either is empty."""
    if len(liked) == 0 or len(others) == 0:
        return math.nan
    ordered = np.sort(others)
    below = np.searchsorted(ordered, liked, side="left")
    up_to = np.searchsorted(ordered, liked, side="right")
    return float((below + up_to).mean() / (2 * len(others)))


def _hits(said: Rows, likes: Rows) -> tuple[float, float]:
    right = len(np.intersect1d(said, likes))
    return (right / len(said) if len(said) else math.nan, right / len(likes))


def _mean(found: Sequence[tuple[float, float, float]]) -> Judgement:
    means = [
        None if np.isnan(column).all() else float(np.nanmean(column))
        for column in np.array(found).T
    ]
    precision, recall, auc = means
    return Judgement(precision or 0.0, recall or 0.0, auc)
