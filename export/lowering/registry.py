"""The closed table of lowerings: which aten operator becomes which ONNX nodes, or simpler ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

LoweringFunction = Callable[..., Any]
"""``lower(graph, out, *args, **kwargs) -> str | tuple[str, ...]``.

``args`` and ``kwargs`` are the aten operator's, with every tensor as a ``Value``; ``out`` is the
operator's fake result (a tensor, or a tuple of them) with dtype and symbolic shape. Returns the
name of the ONNX value, or a tuple of names (None for a result that nothing may use).
"""

_Function = TypeVar("_Function", bound=LoweringFunction)

_TABLE: dict[Any, LoweringFunction] = {}


def lowers(*operators: Any) -> Callable[[_Function], _Function]:
    """Register the decorated function for these aten overloads."""

    def register(function: _Function) -> _Function:
        for operator in operators:
            if operator in _TABLE:
                raise ValueError(f"{operator} has two lowerings")
            _TABLE[operator] = function
        return function

    return register


def find(operator: Any) -> LoweringFunction | None:
    """The lowering of an operator overload, or None."""
    return _TABLE.get(operator)


def operators() -> list[str]:
    """The names of every operator that can be lowered, sorted."""
    return sorted(str(operator) for operator in _TABLE)


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
    return {op: function for op, function in table.items() if find(op) is None}
