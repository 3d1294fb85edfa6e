"""How well clicks were predicted: ACC, AUC, NDCG@5, MAE, and the cross-entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

_LEAST = 1e-7


@dataclass(frozen=True, slots=True)
class ClickQuality:
    """Quality of predicted click probabilities.

    Attributes:
        accuracy: share of samples on the right side of one half.
        auc: area under the ROC curve.
        ndcg: NDCG@5, see :func:`mean_ndcg`; NaN where no user counts.
        mae: mean of |click - probability|.
        loss: mean cross-entropy in nats.
    """

    accuracy: float
    auc: float
    ndcg: float
    mae: float
    loss: float


def click_quality(
    clicks: NDArray[np.int64], probabilities: NDArray[np.float32], users: NDArray[np.int64]
) -> ClickQuality:
    """Quality over all samples [n]; raises ValueError unless there are clicks and others."""
    expected = probabilities.astype(np.float64)
    bounded = np.clip(np.where(clicks == 1, expected, 1 - expected), _LEAST, 1)
    return ClickQuality(
        accuracy=float(np.mean((expected > 0.5) == (clicks == 1))),
        auc=float(roc_auc_score(clicks, expected)),
        ndcg=mean_ndcg(clicks, expected, users),
        mae=float(np.mean(np.abs(clicks - expected))),
        loss=float(-np.mean(np.log(bounded))),
    )


def mean_ndcg(
    clicks: NDArray[np.int64],
    scores: NDArray[np.float64],
    users: NDArray[np.int64],
    cutoff: int = 5,
) -> float:
    """Mean over users of DCG / ideal DCG of their own samples, ranked by score; gain 1 for a click.

    Users with clicks only, or none, are left out: any order is as good for them. Ties count as the
    worst order, so that a constant score gains nothing. NaN where no user is left.
    """
    order = np.lexsort((clicks, -scores, users))
    bounds = np.flatnonzero(np.diff(users[order])) + 1
    discounts = 1 / np.log2(np.arange(cutoff) + 2)
    found = []
    for own in np.split(clicks[order], bounds):
        liked = int(own.sum())
        if 0 < liked < len(own):
            top = own[:cutoff]
            found.append(float(top @ discounts[: len(top)]) / float(discounts[:liked].sum()))
    return float(np.mean(found)) if found else math.nan
