"""Cross-entropies as plain arithmetic."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.errors import ExportError


def _refuse_deprecated(size_average: bool | None, reduce: bool | None, operator: str) -> None:
    if size_average is not None or reduce is not None:
        raise ExportError(
            "size_average and reduce are deprecated in torch",
            operator=operator,
            instead="reduction='mean' or 'sum'",
        )


# Binary cross-entropy from logits by softplus, with its short gradient.


class _Losses(torch.autograd.Function):
    """softplus(x) - x * y = -(y log sigmoid(x) + (1 - y) log(1 - sigmoid(x))), elementwise."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits, target)
        return functional.softplus(logits) - logits * target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        logits, target = ctx.saved_tensors
        of_target = -logits * grad if ctx.needs_input_grad[1] else None
        return (torch.sigmoid(logits) - target) * grad, of_target


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.binary_cross_entropy_with_logits``."""
    _refuse_deprecated(size_average, reduce, "binary_cross_entropy_with_logits")
    if target.shape != input.shape:
        raise ValueError(f"target is {list(target.shape)}, but input is {list(input.shape)}")
    target = target.to(input.dtype)
    if pos_weight is None:
        losses: Tensor = _Losses.apply(input, target)  # type: ignore[no-untyped-call]
    else:
        share = 1 + (pos_weight - 1) * target
        losses = (1 - target) * input + share * functional.softplus(-input)
    if weight is not None:
        losses = losses * weight
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


# Cross-entropy by a one-hot mask, so that the mean's divisor is the true count.
#
# Where torch raises for a label that is no class, the loss becomes NaN, and the device refuses the
# step: the label's row of the mask holds zeros alone, and 0 / 0 is NaN.


class _Mean(torch.autograd.Function):
    """Mean over all counted samples of -log softmax(logits)[class], with its short gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, hot: Tensor, counted: Tensor) -> Tensor:
        log_probability = torch.log_softmax(logits, 1)
        count = counted.sum()
        ctx.save_for_backward(log_probability, hot, counted, count)
        return -((log_probability * hot).sum() / count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        log_probability, hot, counted, count = ctx.saved_tensors
        # An ignored sample has a row of zeros in ``hot``: no gradient.
        return (torch.exp(log_probability) * counted - hot) * (grad / count), None, None


def _reduced(losses: Tensor, weights: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / weights.sum()


def _one_hot(target: Tensor, classes: int, like: Tensor) -> Tensor:
    """[b, d...] class numbers to [b, classes, d...]; a number outside gives zeros."""
    line = torch.arange(classes).reshape([1, classes] + [1] * (target.dim() - 1))
    return (target.unsqueeze(1) == line).to(like.dtype)


def _counted(hot: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """[b, 1, d...]: 1 for a class, 0 for what is ignored, NaN for any other label."""
    total = hot.sum(1, keepdim=True)
    return torch.where(target.unsqueeze(1) == ignore_index, 0.0, total / total)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """``torch.nn.functional.nll_loss`` for input [b, c] or [b, c, d...]."""
    _refuse_deprecated(size_average, reduce, "nll_loss")
    single = input.dim() == 1
    log_probability = input.unsqueeze(0) if single else input
    target = target.unsqueeze(0) if single else target
    classes = log_probability.shape[1]
    hot = _one_hot(target, classes, input)
    hot = hot * _counted(hot, target, ignore_index)
    if weight is not None:
        hot = hot * weight.reshape([1, classes] + [1] * (target.dim() - 1))
    weights = hot
    losses = -(log_probability * hot).sum(1)
    if single and reduction == "none":
        return losses[0]
    return _reduced(losses, weights, reduction)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` with class numbers or class probabilities."""
    plain_mean = (
        reduction == "mean"
        and weight is None
        and label_smoothing == 0
        and input.dim() > 1
        and not 0 <= ignore_index < input.shape[1]
        and not target.is_floating_point()
        and size_average is None
        and reduce is None
    )
    if plain_mean:
        hot = _one_hot(target, input.shape[1], input)
        counted = _counted(hot, target, ignore_index)
        loss: Tensor = _Mean.apply(input, hot, counted)  # type: ignore[no-untyped-call]
        return loss
    axis = 0 if input.dim() == 1 else 1
    log_probability = torch.log_softmax(input, axis)
    if not target.is_floating_point():
        plain = nll_loss(
            log_probability, target, weight, size_average, ignore_index, reduce, reduction
        )
        if label_smoothing == 0:
            return plain
        return _smoothed(log_probability, target, weight, ignore_index, reduction, label_smoothing)
    classes = input.shape[axis]
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    product = log_probability * target
    if weight is not None:
        product = product * weight.reshape([1, classes] + [1] * (input.dim() - 2))
    losses = -product.sum(axis)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / losses.numel()


def _smoothed(
    log_probability: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> Tensor:
    if log_probability.dim() == 1:
        raise ExportError(
            "label smoothing of a single unbatched sample",
            operator="cross_entropy",
            instead="a batch axis",
        )
    classes = log_probability.shape[1]
    plain = nll_loss(log_probability, target, weight, ignore_index=ignore_index, reduction="none")
    counted = (target != ignore_index).to(log_probability.dtype)
    spread = log_probability
    weights = counted
    if weight is not None:
        row = weight.reshape([1, classes] + [1] * (target.dim() - 1))
        spread = spread * row
        weights = (_one_hot(target, classes, log_probability) * row).sum(1) * counted
    smooth = -spread.sum(1) * counted
    losses = plain * (1 - smoothing) + smooth * (smoothing / classes)
    return _reduced(losses, weights, reduction)
