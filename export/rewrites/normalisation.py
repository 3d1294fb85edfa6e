"""Normalisations and activations with short gradients, as plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.errors import ExportError
from export.rewrites import RECORDED, TRAINED
from export.short_gradients import ShortGradient

# Batch normalisation as plain operators that also give the new running statistics.


class _BatchNormalise(ShortGradient):
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
    y, mean, variance = _BatchNormalise.apply(input, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        share = momentum * (count / (count - 1))
        running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
        running_var.copy_(running_var * (1 - momentum) + variance * share)
    result: Tensor = y
    return result


# Batch normalisation's layer, whose count of batches stays a tensor.


def batch_norm_layer_forward(layer: Any, input: Tensor) -> Tensor:
    """``torch.nn.BatchNorm1d.forward`` and its kin.

    torch reads ``num_batches_tracked`` as a number where momentum is None (a plain average over
    all batches); here it stays a tensor.
    """
    layer._check_input_dim(input)
    momentum = 0.0 if layer.momentum is None else layer.momentum
    counter = layer.num_batches_tracked
    if layer.training and layer.track_running_stats and counter is not None:
        counter.add_(1)
        if layer.momentum is None:
            momentum = 1 / counter.to(input.dtype)
    without = layer.running_mean is None and layer.running_var is None
    kept = not layer.training or layer.track_running_stats
    return functional.batch_norm(
        input,
        layer.running_mean if kept else None,
        layer.running_var if kept else None,
        layer.weight,
        layer.bias,
        layer.training or without,
        momentum,
        layer.eps,
    )


# Layer normalisation with its short gradient.


class _LayerNormalise(ShortGradient):
    """(x - mean) / sqrt(var + eps) over the last axes (Ba et al. 2016, equation 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: list[int], eps: float) -> Tensor:
        centred = x - x.mean(axes, keepdim=True)
        inverse = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
        normal = centred * inverse
        ctx.save_for_backward(normal, inverse)
        ctx.axes = axes
        # A copy, into which an activation in place may write: torch keeps the input, not this.
        return normal.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        normal, inverse = ctx.saved_tensors
        mean = grad.mean(ctx.axes, keepdim=True)
        slope = (grad * normal).mean(ctx.axes, keepdim=True)
        return (grad - mean - normal * slope) * inverse, None, None


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.layer_norm``.

    Not onnxruntime's LayerNormalization: that crashes without a bias (1.31), and its variance,
    E[x^2] - E[x]^2, loses the digits of data far from zero.
    """
    axes = list(range(-len(normalized_shape), 0))
    y: Tensor = _LayerNormalise.apply(input, axes, eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


# Group and instance normalisation by way of layer normalisation.


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.group_norm`` for input [b, c, ...] (Wu and He 2018, equation 7)."""
    batch, channels = input.shape[:2]
    if channels % num_groups:
        raise ValueError(f"{channels} channels cannot be split into {num_groups} equal groups")
    elements = channels // num_groups
    for size in input.shape[2:]:
        elements = elements * size
    grouped = input.reshape(batch, num_groups, elements)
    y = layer_norm(grouped, [elements], eps=eps).reshape(input.shape)
    line = [channels] + [1] * (input.dim() - 2)
    if weight is not None:
        y = y * weight.reshape(line)
    return y if bias is None else y + bias.reshape(line)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.instance_norm``; its own running statistics only in evaluation."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None:
        raise ExportError(
            "instance normalisation that trains running statistics",
            operator="instance_norm",
            instead="track_running_stats=False, torch's default",
        )
    return group_norm(input, input.shape[1], weight, bias, eps)


RECORDED.replaces(
    (functional, "batch_norm", batch_norm),
    (torch.nn.modules.batchnorm._BatchNorm, "forward", batch_norm_layer_forward),
    (functional, "group_norm", group_norm),
    (functional, "instance_norm", instance_norm),
    (functional, "layer_norm", layer_norm),
)


# Activations whose gradient shares what the activation itself computed.

_HALF_ROOT = math.sqrt(0.5)
_LOG_ROOT_PI = 0.5 * math.log(math.pi)


class _Gelu(ShortGradient):
    """x Phi(x), Phi the normal distribution (Hendrycks and Gimpel 2016, equation 1).

    With u = x / sqrt(2) Phi is (1 + erf(u)) / 2, and the slope Phi + u exp(-u^2) / sqrt(pi).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        u = x * _HALF_ROOT
        share = torch.erf(u) * 0.5 + 0.5
        ctx.save_for_backward(u, share)
        return x * share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        u, share = ctx.saved_tensors
        slope: Tensor = grad * (share + u * torch.exp(-_LOG_ROOT_PI - u * u))
        return slope


_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


class _GeluByTanh(ShortGradient):
    """x sigmoid(z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3): torch's approximation, as tanh is
    2 sigmoid(2 y) - 1. The slope is s (1 + (1 - s) x z'), s = sigmoid(z)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        factor = x * x * _CUBIC + _LINEAR
        share = torch.sigmoid(x * factor)
        ctx.save_for_backward(x, factor, share)
        return x * share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, factor, share = ctx.saved_tensors
        along = x * (factor * 3 - 2 * _LINEAR)
        slope: Tensor = grad * (share * ((1 - share) * along + 1))
        return slope


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """``torch.nn.functional.gelu``."""
    kind: Any = {"none": _Gelu, "tanh": _GeluByTanh}.get(approximate)
    if kind is None:
        raise ValueError(f"approximate is {approximate!r}; expected 'none' or 'tanh'")
    result: Tensor = kind.apply(input)
    return result


TRAINED.equals({functional.gelu: gelu})
