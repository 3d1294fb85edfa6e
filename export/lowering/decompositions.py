"""Operators broken into simpler ones: torch's own decompositions, and those that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
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
    grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Gradients of v and g in w = v g / |v| (Salimans and Kingma 2016, equation 3)."""
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    along = (grad * v).sum(axes, keepdim=True) / norms
    return (g / norms) * (grad - v * (along / norms)), along


# A mask as the numbers of its true places. How many there are is known at run time; torch calls
# such a size u0, u1, ..., and what is computed from it follows.

Indices = list[Tensor | None]


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _numbered(indices: Indices) -> Indices:
    numbered: Indices = []
    for index in indices:
        if index is not None and _is_mask(index):
            numbered += list(aten.nonzero(index).unbind(1))
        else:
            numbered.append(index)
    return numbered


def _index(a: Tensor, indices: Indices) -> Tensor:
    if not any(map(_is_mask, indices)):
        return NotImplemented  # type: ignore[no-any-return]
    found: Tensor = aten.index(a, _numbered(indices))
    return found


def _index_put(a: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> Tensor:
    if not any(map(_is_mask, indices)):
        return NotImplemented  # type: ignore[no-any-return]
    masks = [index for index in indices if index is not None]
    if len(masks) == 1 and values.dim() == 0 and not accumulate:
        after = a.dim() - len(indices) + 1 - masks[0].dim()
        mask = masks[0].reshape([*masks[0].shape, *[1] * after])
        return torch.where(mask, values, a)
    numbered = _numbered(indices)
    if accumulate and all(map(_is_mask, masks)) and len(masks) == 1:
        # No place twice: no sum that two threads could race for.
        values = values + aten.index(a, numbered)
    found: Tensor = aten.index_put(a, numbered, values, accumulate and len(masks) > 1)
    return found


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator to decomposition; what has a lowering of its own is kept whole."""
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions().items())
    table.update(get_decompositions(_MORE))
    table[aten._weight_norm_interface_backward.default] = _weight_norm_backward
    simpler = {op: function for op, function in table.items() if registry.find(op) is None}
    return simpler | {
        aten.index.Tensor: _index,
        aten.index_put.default: _index_put,
    }
