"""Operators broken into simpler ones: torch's own decompositions, and those that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from export.lowering import registry

aten = torch.ops.aten

# Broken up beside what torch's core set is.
_MORE = (
    aten.native_batch_norm,
    aten.native_group_norm,
    # onnxruntime's LayerNormalization crashes without a bias, and loses digits on data far from 0.
    aten.native_layer_norm,
    aten.elu,
    aten.leaky_relu,
    aten.linalg_vector_norm,
    aten.var_mean,
    aten.var,
    aten.std,
    aten._euclidean_dist,
    aten.upsample_nearest2d,
    aten.cumprod,
    aten.rrelu_with_noise_backward,
)


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of v and g in w = v g / |v| (Salimans and Kingma 2016, equation 3)."""
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    along = (grad * v).sum(axes, keepdim=True) / norms
    return (g / norms) * (grad - v * (along / norms)), along


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator to decomposition; what has a lowering of its own is kept whole."""
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions().items())
    table.update(get_decompositions(_MORE))
    table[aten._weight_norm_interface_backward.default] = _weight_norm_backward
    return {op: function for op, function in table.items() if registry.find(op) is None}
