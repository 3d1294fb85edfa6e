"""How right an attack is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.privacy.attack import LikesModel, evidence, liked_by_size
from benchmarks.privacy.sighting import Sighting

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
