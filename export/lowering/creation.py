"""Tensors made from numbers: fills, ranges, and constants of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from export.errors import ExportError
from export.lowering.graph import NUMPY_DTYPE, Graph, Scalar, Value
from export.lowering.registry import lowers
from export.lowering.shapes import transpose_order
from export.symbols import Dim, expression, fixed

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
    return g.cast(Value(g.op("Range", *ends), torch.int64, tuple(out.shape)), out.dtype)


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(g: Graph, out: Any, *bounds: Any, **like: Any) -> str:
    start, end, step, *_ = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)
    if fixed(step) == 1 and not any(isinstance(each, float) for each in (start, end)):
        g.at_least_zero(expression(end - start))
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


def _triangle_indices(make: Callable[..., torch.Tensor]) -> Any:
    def lower(g: Graph, out: Any, rows: Dim, columns: Dim, offset: int = 0, **like: Any) -> str:
        sizes = fixed(rows), fixed(columns)
        if sizes[0] is None or sizes[1] is None:
            raise ExportError(
                "the places of a triangle whose size is free",
                instead="torch.ones(n, n).triu() as a mask",
            )
        return g.constant(make(sizes[0], sizes[1], offset, dtype=out.dtype).numpy())

    return lower


lowers(aten.triu_indices.default)(_triangle_indices(torch.triu_indices))
lowers(aten.tril_indices.default)(_triangle_indices(torch.tril_indices))


# Diagonals, sliding windows and broadcasts: elements picked by a rule, not by an index tensor.


@lowers(aten.diagonal.default)
def diagonal(g: Graph, out: Any, a: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    """[.., r, c] to [.., n]: every (c + 1)th element of the flattened matrix."""
    first, second = dim1 % a.rank, dim2 % a.rank
    rest = [axis for axis in range(a.rank) if axis not in (first, second)]
    moved = transpose_order(g, a, [*rest, first, second])
    rows, columns = a.shape[first], a.shape[second]
    flat = g.op("Reshape", moved, g.target([*(a.shape[axis] for axis in rest), rows * columns]))
    start: Dim = offset if offset >= 0 else columns * -offset
    steps = arange_between(g, 0, out.shape[-1], 1, torch.empty(0, dtype=torch.int64))
    places = g.op("Add", g.op("Mul", steps, g.dim(columns + 1)), g.dim(start))
    return g.op("Gather", flat, places, axis=len(rest))


@lowers(aten.unfold.default)
def unfold(g: Graph, out: Any, a: Value, dim: int, size: int, step: int) -> str:
    """Windows along ``dim``, their elements last: a Gather and a permutation."""
    axis = dim % max(a.rank, 1)
    count = fixed(out.shape[axis])
    if count is None:
        g.at_least_zero(expression(a.shape[axis]) - size)
        first = arange_between(g, 0, out.shape[axis], 1, torch.empty(0, dtype=torch.int64))
        starts = g.op("Unsqueeze", g.op("Mul", first, g.scalar(step, torch.int64)), g.ints([1]))
        places = g.op("Add", starts, g.ints(range(size)))
    else:
        places = g.constant(np.add.outer(np.arange(count) * step, np.arange(size)))
    windows = g.op("Gather", a, places, axis=axis)
    order = [*range(axis + 1), *range(axis + 2, a.rank + 1), axis + 1]
    return windows if order == list(range(a.rank + 1)) else g.op("Transpose", windows, perm=order)
