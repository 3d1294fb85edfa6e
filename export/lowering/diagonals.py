"""Diagonals, sliding windows and broadcasts: elements picked by a rule, not by an index tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from export.errors import ExportError
from export.lowering.creation import arange_between
from export.lowering.graph import Dim, Graph, Value, fixed, same
from export.lowering.registry import lowers
from export.lowering.shapes import transpose_order

aten = torch.ops.aten


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


@lowers(aten.diagonal_backward.default)
def diagonal_backward(
    g: Graph, out: Any, grad: Value, sizes: Sequence[Dim], offset: int, dim1: int, dim2: int
) -> str:
    """The gradient on the diagonal of a square matrix of zeros."""
    rank = len(sizes)
    first, second = dim1 % rank, dim2 % rank
    if offset != 0 or not same(sizes[first], sizes[second]):
        raise ExportError(
            "the gradient of a diagonal beside the main one, or of a matrix that is not square",
            operator="aten.diagonal_backward",
            instead="the main diagonal of a square matrix, or a product with a mask",
        )
    line = arange_between(g, 0, sizes[first], 1, torch.empty(0, dtype=torch.int64))
    mask = g.op("Equal", g.op("Unsqueeze", line, g.ints([1])), line)
    column = g.op("Unsqueeze", grad, g.ints([-1]))
    spread = g.op("Where", mask, column, g.scalar(0, grad.dtype))
    rest = [axis for axis in range(rank) if axis not in (first, second)]
    order = [*rest, first, second]
    back = [order.index(axis) for axis in range(rank)]
    return spread if back == list(range(rank)) else g.op("Transpose", spread, perm=back)


@lowers(aten.unfold.default)
def unfold(g: Graph, out: Any, a: Value, dim: int, size: int, step: int) -> str:
    """Windows along ``dim``, their elements last: a Gather and a permutation."""
    axis = dim % max(a.rank, 1)
    count = fixed(out.shape[axis])
    if count is None:
        first = arange_between(g, 0, out.shape[axis], 1, torch.empty(0, dtype=torch.int64))
        starts = g.op("Unsqueeze", g.op("Mul", first, g.scalar(step, torch.int64)), g.ints([1]))
        places = g.op("Add", starts, g.ints(range(size)))
    else:
        places = g.constant(np.add.outer(np.arange(count) * step, np.arange(size)))
    windows = g.op("Gather", a, places, axis=axis)
    order = [*range(axis + 1), *range(axis + 2, a.rank + 1), axis + 1]
    return windows if order == list(range(a.rank + 1)) else g.op("Transpose", windows, perm=order)


@lowers(torch.ops.prims.broadcast_in_dim.default)
def broadcast_in_dim(
    g: Graph, out: Any, a: Value, shape: Sequence[Dim], places: Sequence[int]
) -> str:
    """``a`` with its axes at ``places`` of the result, repeated along all others."""
    between: list[Dim] = [1] * len(shape)
    for axis, place in enumerate(places):
        between[place] = a.shape[axis]
    reshaped = g.reshape(a, between)
    if all(same(have, want) for have, want in zip(between, out.shape, strict=True)):
        return reshaped
    return g.op("Expand", reshaped, g.shape(out.shape))
