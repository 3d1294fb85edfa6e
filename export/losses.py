"""Losses for train steps, each a scalar mean (or sum) over the batch.

They use torch operators only, so they can be used in ordinary training as well.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


def _reduce(losses: Tensor, weight: Tensor | None, reduction: Reduction) -> Tensor:
    """Per-sample losses to one number; a weighted mean is divided by the sum of the weights."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")
    if weight is not None:
        losses = losses * weight
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.mean() if weight is None else losses.sum() / weight.sum()


def cross_entropy(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """-log softmax(logits)[target].

    logits [b, classes]; target int64 [b] (hard labels) or float [b, classes] (soft labels);
    weight [b], a weight a sample. A hard label outside 0..classes-1 makes its loss NaN, and a
    device refuses the step.
    """
    log_probability = torch.log_softmax(logits, dim=-1)
    if target.is_floating_point():
        return _reduce(-(target * log_probability).sum(-1), weight, reduction)
    classes = torch.arange(logits.shape[-1])
    hot = (target.unsqueeze(-1) == classes).to(logits.dtype)
    # Divided by 1; by 0, where the label is no class.
    return _reduce(-(hot * log_probability).sum(-1) / hot.sum(-1), weight, reduction)


def kl_divergence(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """KL(target || softmax(logits)), summed over classes.

    logits [b, classes]; target float [b, classes], each row a distribution (zeros allowed).
    """
    log_probability = torch.log_softmax(logits, dim=-1)
    positive = target > 0
    log_target = torch.log(torch.where(positive, target, torch.ones_like(target)))
    return _reduce((target * (log_target - log_probability)).sum(-1), weight, reduction)


def binary_cross_entropy(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """-(y log sigmoid(x) + (1 - y) log(1 - sigmoid(x))), in the form that cannot overflow.

    logits and target (0 to 1) of one shape; weight of that shape.
    """
    target = target.to(logits.dtype)
    losses = functional.softplus(logits) - logits * target
    return _reduce(losses, weight, reduction)


def mean_squared_error(
    prediction: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """(prediction - target)^2; all of one shape."""
    difference = prediction - target
    return _reduce(difference * difference, weight, reduction)


def bpr(
    positive: Tensor,
    negative: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """-log sigmoid(positive - negative): Bayesian personalised ranking (Rendle et al. 2009, eq. 3).

    Scores of seen and unseen items, of one shape.
    """
    return _reduce(functional.softplus(negative - positive), weight, reduction)
