"""Binary cross-entropy from logits by softplus, with its short gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.errors import ExportError


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
    if size_average is not None or reduce is not None:
        raise ExportError(
            "size_average and reduce are deprecated in torch",
            operator="binary_cross_entropy_with_logits",
            instead="reduction='mean' or 'sum'",
        )
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
