"""Layer normalisation with its short gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) over the last axes (Ba et al. 2016, equation 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: list[int], eps: float) -> Tensor:
        centred = x - x.mean(axes, keepdim=True)
        inverse = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
        normal = centred * inverse
        ctx.save_for_backward(normal, inverse)
        ctx.axes = axes
        return normal

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
    y: Tensor = _Normalise.apply(input, axes, eps)  # type: ignore[no-untyped-call]
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias
