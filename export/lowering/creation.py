"""Tensors made from numbers: fills, ranges, and constants of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from export.lowering.graph import NUMPY_DTYPE, Dim, Graph, Scalar, Value, fixed
from export.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.full.default)
def full(g: Graph, out: Any, sizes: Any, value: Scalar, **like: Any) -> str:
    if isinstance(value, torch.SymInt):
        return g.op("Expand", g.cast(g.dim(value), out.dtype), g.shape(out.shape))
    return g.full(out.shape, value, out.dtype)


@lowers(aten.full_like.default, aten.new_full.default)
def full_like(g: Graph, out: Any, a: Value, *rest: Any, **like: Any) -> str:
    return g.full(out.shape, rest[-1], out.dtype)


@lowers(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_strided.default,
)
def zeros(g: Graph, out: Any, *args: Any, **like: Any) -> str:
    return g.full(out.shape, 0, out.dtype)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(g: Graph, out: Any, *args: Any, **like: Any) -> str:
    return g.full(out.shape, 1, out.dtype)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(g: Graph, out: Any, value: Scalar | Dim, **like: Any) -> str:
    if isinstance(value, torch.SymInt):
        return g.cast(g.op("Squeeze", g.dim(value), g.ints([0])), out.dtype)
    return g.scalar(value, out.dtype)


def arange_between(g: Graph, start: Dim | float, end: Dim | float, step: Any, out: Any) -> str:
    """Whole or fractional steps from start up to, not including, end."""
    if not any(isinstance(bound, torch.SymInt) for bound in (start, end, step)) or (
        all(not isinstance(b, torch.SymInt) or fixed(b) is not None for b in (start, end, step))
    ):
        bounds = [b if isinstance(b, float) else int(b) for b in (start, end, step)]
        values = torch.arange(*bounds, dtype=out.dtype)
        return g.constant(values.numpy())
    ends = [
        g.op("Squeeze", g.dim(b), g.ints([0]))
        if isinstance(b, (int, torch.SymInt))
        else g.scalar(b, torch.int64)
        for b in (start, end, step)
    ]
    return (
        g.cast(g.op("Range", *ends), out.dtype)
        if out.dtype != torch.int64
        else g.op("Range", *ends)
    )


@lowers(aten.arange.default)
def arange(g: Graph, out: Any, end: Any, **like: Any) -> str:
    return arange_between(g, 0, end, 1, out)


@lowers(aten.arange.start)
def arange_start(g: Graph, out: Any, start: Any, end: Any, **like: Any) -> str:
    return arange_between(g, start, end, 1, out)


@lowers(aten.arange.start_step)
def arange_step(g: Graph, out: Any, start: Any, end: Any, step: Any = 1, **like: Any) -> str:
    return arange_between(g, start, end, step, out)


@lowers(aten.eye.default, aten.eye.m)
def eye(g: Graph, out: Any, *sizes: Any, **like: Any) -> str:
    rows, columns = (fixed(size) for size in out.shape)
    if rows is not None and columns is not None:
        return g.constant(np.eye(rows, columns, dtype=NUMPY_DTYPE[out.dtype]))
    line = arange_between(g, 0, out.shape[0], 1, torch.empty(0, dtype=torch.int64))
    other = arange_between(g, 0, out.shape[1], 1, torch.empty(0, dtype=torch.int64))
    equal = g.op("Equal", g.op("Unsqueeze", line, g.ints([1])), other)
    return g.cast(equal, out.dtype)
