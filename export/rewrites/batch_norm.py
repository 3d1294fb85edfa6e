"""Batch normalisation as plain operators that also give the new running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias over all but axis 1, with its short gradient.

    Ioffe and Szegedy 2015, section 3. The two sums that the gradient needs are also the
    gradients of weight and bias, so they are computed once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without axes behind the channels, [c] lines up with [b, c] as it is.
        axes, keep = [0, *range(2, x.dim())], x.dim() > 2
        mean = x.mean(axes, keepdim=keep)
        centred = x - mean
        variance = (centred * centred).mean(axes, keepdim=keep)
        inverse = torch.rsqrt(variance + eps)
        shape = mean.shape
        scale = inverse if weight is None else inverse * weight.reshape(shape)
        y = centred * scale
        if bias is not None:
            y = y + bias.reshape(shape)
        ctx.save_for_backward(centred, inverse, scale)
        ctx.affine = weight is not None, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return y, mean.reshape(-1), variance.reshape(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        centred, inverse, scale = ctx.saved_tensors
        axes, keep = [0, *range(2, grad.dim())], grad.dim() > 2
        count = grad.numel() // grad.shape[1]
        total = grad.sum(axes, keepdim=keep)
        product = (grad * centred).sum(axes, keepdim=keep)
        share = 1 / count
        slope = product * (inverse * inverse * share)
        grad_x = (grad - (total * share) - centred * slope) * scale
        grad_weight = (product * inverse).reshape(-1) if ctx.affine[0] else None
        grad_bias = total.reshape(-1) if ctx.affine[1] else None
        return grad_x, grad_weight, grad_bias, None


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm``: running statistics are updated in place.

    As in torch the running variance takes the unbiased estimate, n / (n - 1) of the batch's.
    """
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError("batch_norm in evaluation mode needs running statistics")
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(running_var + eps)
        if weight is not None:
            scale = scale * weight
        shift = -running_mean * scale
        if bias is not None:
            shift = shift + bias
        return input * scale.reshape(shape) + shift.reshape(shape)
    y, mean, variance = _Normalise.apply(input, weight, bias, eps)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        share = momentum * (count / (count - 1))
        running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
        running_var.copy_(running_var * (1 - momentum) + variance * share)
    result: Tensor = y
    return result
