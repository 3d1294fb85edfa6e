"""Cross-entropies as plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.errors import ExportError
from export.rewrites import RECORDED, taking
from export.short_gradients import ShortGradient

Settings = Mapping[str, Any]


def _refuse_deprecated(settings: Settings, operator: str) -> None:
    if settings["size_average"] is not None or settings["reduce"] is not None:
        raise ExportError(
            "size_average and reduce are deprecated in torch",
            operator=operator,
            instead="reduction='mean' or 'sum'",
        )


# Binary cross-entropy from logits by softplus, with its short gradient.


class _Losses(ShortGradient):
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


@taking(functional.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Tensor, target: Tensor, weight: Tensor | None, settings: Settings
) -> Tensor:
    """``torch.nn.functional.binary_cross_entropy_with_logits``."""
    _refuse_deprecated(settings, "binary_cross_entropy_with_logits")
    reduction, pos_weight = settings["reduction"], settings["pos_weight"]
    if target.shape != input.shape:
        raise ValueError(f"target is {list(target.shape)}, but input is {list(input.shape)}")
    target = target.to(input.dtype)
    if pos_weight is None:
        losses: Tensor = _Losses.apply(input, target)
    else:
        share = 1 + (pos_weight - 1) * target
        losses = (1 - target) * input + share * functional.softplus(-input)
    if weight is not None:
        losses = losses * weight
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


# Cross-entropy by looking up each sample's class: one pass over the classes for the loss, three for
# its gradient.
#
# Where torch raises for a label that is no class, the loss becomes NaN, and the device refuses the
# step: such a label counts NaN times.


class _OfLogits(ShortGradient):
    """share * -log softmax(logits)[class], with its short gradient; 0 where ``ignored``.

    logits [b, c, d...]; place int64, ignored bool and share [b, 1, d...] -> [b, 1, d...].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, place: Tensor, ignored: Tensor, share: Tensor) -> Tensor:
        log_probability = torch.log_softmax(logits, 1)
        ctx.save_for_backward(log_probability, place, share)
        return _of_log_probability(log_probability, place, ignored, share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        log_probability, place, share = ctx.saved_tensors
        share = share * grad
        scaled = torch.exp(log_probability) * share
        return scaled.scatter(1, place, scaled.gather(1, place) - share), None, None, None


def _of_log_probability(
    log_probability: Tensor, place: Tensor, ignored: Tensor, share: Tensor
) -> Tensor:
    # Not times 0 alone: an ignored sample's log-probability may be infinite.
    chosen = torch.where(ignored, 0.0, log_probability.gather(1, place))
    return -(chosen * share)


class _Labels:
    """Labels [b, d...] as what is looked up, each [b, 1, d...].

    ``place`` int64 is a class, ``ignored`` bool, and ``counted`` how often the label counts: once,
    not at all, or NaN times where it is no class; times its class's weight.
    """

    def __init__(
        self, target: Tensor, like: Tensor, weight: Tensor | None, ignore_index: int
    ) -> None:
        column = target.unsqueeze(1)
        place = column.clamp(0, like.shape[1] - 1)
        self.place = place.to(torch.int64)
        self.ignored = column == ignore_index
        known = torch.where(place == column, 1.0, math.nan)
        self.counted = torch.where(self.ignored, 0.0, known).to(like.dtype)
        self.weights = self.counted if weight is None else self.counted * weight[self.place]

    def share(self, reduction: str) -> Tensor:
        """What to multiply each loss by before they are summed."""
        return self.weights / self.weights.sum() if reduction == "mean" else self.weights


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses.squeeze(1) if reduction == "none" else losses.sum()


@taking(functional.nll_loss)
def nll_loss(input: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> Tensor:
    """``torch.nn.functional.nll_loss`` for input [b, c] or [b, c, d...]."""
    _refuse_deprecated(settings, "nll_loss")
    reduction = settings["reduction"]
    if input.dim() == 1:
        return _of_one_row(nll_loss, settings)
    label = _Labels(target, input, weight, settings["ignore_index"])
    losses = _of_log_probability(input, label.place, label.ignored, label.share(reduction))
    return _reduced(losses, reduction)


@taking(functional.cross_entropy)
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, settings: Settings
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` with class numbers or class probabilities."""
    _refuse_deprecated(settings, "cross_entropy")
    reduction, label_smoothing = settings["reduction"], settings["label_smoothing"]
    if input.dim() == 1:
        return _of_one_row(cross_entropy, settings)
    if target.is_floating_point():
        return _soft(input, target, weight, reduction, label_smoothing)
    label = _Labels(target, input, weight, settings["ignore_index"])
    if label_smoothing > 0:
        return _smoothed(input, label, weight, reduction, label_smoothing)
    losses: Tensor = _OfLogits.apply(input, label.place, label.ignored, label.share(reduction))
    return _reduced(losses, reduction)


def _of_one_row(loss: Callable[..., Tensor], settings: Settings) -> Tensor:
    """A loss of input [c], as that of one row."""
    row = {name: settings[name].unsqueeze(0) for name in ("input", "target")}
    return loss(**{**settings, **row}).reshape([])


def _soft(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, smoothing: float
) -> Tensor:
    log_probability = torch.log_softmax(logits, 1)
    classes = logits.shape[1]
    if smoothing > 0:
        target = target * (1 - smoothing) + smoothing / classes
    product = log_probability * target
    if weight is not None:
        product = product * weight.reshape([1, classes] + [1] * (logits.dim() - 2))
    losses = -product.sum(1)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / losses.numel()


def _smoothed(
    logits: Tensor, label: _Labels, weight: Tensor | None, reduction: str, smoothing: float
) -> Tensor:
    """(1 - s) times the label's loss and s times the mean loss of all classes."""
    classes = logits.shape[1]
    log_probability = torch.log_softmax(logits, 1)
    spread = log_probability
    if weight is not None:
        spread = spread * weight.reshape([1, classes] + [1] * (logits.dim() - 2))
    plain = _of_log_probability(log_probability, label.place, label.ignored, label.weights)
    smooth = -spread.sum(1, keepdim=True) * label.counted
    losses = plain * (1 - smoothing) + smooth * (smoothing / classes)
    if reduction == "mean":
        return losses.sum() / label.weights.sum()
    return _reduced(losses, reduction)


@taking(functional.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, settings: Settings
) -> Tensor:
    """``torch.nn.functional.gaussian_nll_loss``; NaN where torch raises for a variance below 0."""
    reduction = settings["reduction"]
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; expected 'none', 'mean' or 'sum'")
    variance = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if variance.dim() == input.dim() - 1:
        variance = variance.unsqueeze(-1)
    # The gradient passes a variance that is raised to eps, as in torch.
    raised = variance + (variance.clamp(min=settings["eps"]) - variance).detach()
    loss = 0.5 * (torch.log(raised) + (input - target) ** 2 / raised)
    if settings["full"]:
        loss = loss + 0.5 * math.log(2 * math.pi)
    loss = torch.where((variance < 0).any(), math.nan, loss)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


RECORDED.replaces(
    (functional, "binary_cross_entropy_with_logits", binary_cross_entropy_with_logits),
    (functional, "cross_entropy", cross_entropy),
    (functional, "gaussian_nll_loss", gaussian_nll_loss),
    (functional, "nll_loss", nll_loss),
)
