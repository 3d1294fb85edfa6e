"""Tensors made of numbers, and operators that move whole tensors unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from export.errors import ExportError
from export.lowering.channels import (
    exchanged,
    held_first,
    is_line,
    is_small_image,
    other_axis,
    swapped,
    with_first,
)
from export.lowering.graph import NUMPY_DTYPE, Graph, Scalar, Value
from export.lowering.registry import lowers
from export.symbols import Dim, expression, fixed, same_shape

aten = torch.ops.aten


@lowers(
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten._reshape_copy.default,
    aten.flatten.using_ints,
)
def view(g: Graph, out: Any, a: Value, *where: Any) -> str:
    producer = g.producer.get(a.name)
    if producer is not None and producer.op_type == "Reshape":
        return g.reshape(producer.input[0], out.shape)
    first = held_first(g, a)
    return g.reshape(first if first is not None and is_line(a) else a, out.shape)


@lowers(aten.expand.default)
def expand(g: Graph, out: Any, a: Value) -> str:
    if same_shape(a.shape, out.shape):
        return a.name
    producer = g.producer.get(a.name)
    source = a.name
    if producer is not None and producer.op_type == "Expand" and len(a.shape) == len(out.shape):
        source = producer.input[0]
    elif len(a.shape) == len(out.shape) and is_small_image(out.shape):
        # The gradient of a mean over images: what it meets is held channels first.
        wide = g.op("Expand", with_first(g, a), g.shape(swapped(out.shape)))
        return exchanged(g, wide, len(out.shape))
    return g.op("Expand", source, g.shape(out.shape))


def transpose_order(g: Graph, a: Value, order: Sequence[int]) -> str:
    """A Transpose, composed with the one before it and left out where nothing moves."""
    order = [dim % max(a.rank, 1) for dim in order]
    source = a.name
    producer = g.producer.get(a.name)
    if producer is not None and producer.op_type == "Transpose":
        before = list(producer.attribute[0].ints)
        source = producer.input[0]
        order = [before[dim] for dim in order]
    if order == list(range(len(order))):
        return source
    return g.op("Transpose", source, perm=order)


@lowers(aten.permute.default)
def permute(g: Graph, a: Value, order: Sequence[int]) -> str:
    return transpose_order(g, a, order)


@lowers(aten.transpose.int)
def transpose(g: Graph, a: Value, first: int, second: int) -> str:
    order = list(range(a.rank))
    order[first], order[second] = order[second], order[first]
    return transpose_order(g, a, order)


@lowers(aten.t.default)
def t(g: Graph, a: Value) -> str:
    return transpose_order(g, a, list(range(a.rank))[::-1])


@lowers(aten.cat.default)
def cat(g: Graph, out: Any, tensors: Sequence[Value], dim: int = 0) -> str:
    # torch skips legacy empty tensors of shape [0].
    kept = [v for v in tensors if not (v.rank == 1 and out.dim() > 1 and fixed(v.shape[0]) == 0)]
    names = [g.cast(value, out.dtype) for value in kept]
    if len(names) == 1:
        return names[0]
    axis = dim % out.dim()
    first = [held_first(g, name) for name in names]
    if None not in first:
        joined = g.op("Concat", *first, axis=other_axis(axis))
        return exchanged(g, joined, out.dim())
    return g.op("Concat", *names, axis=axis)


@lowers(aten.stack.default)
def stack(g: Graph, out: Any, tensors: Sequence[Value], dim: int = 0) -> str:
    axis = dim % out.dim()
    parts = [g.op("Unsqueeze", g.cast(value, out.dtype), g.ints([axis])) for value in tensors]
    return g.op("Concat", *parts, axis=axis)


@lowers(aten.repeat.default)
def repeat(g: Graph, a: Value, repeats: Sequence[Dim]) -> str:
    lead = len(repeats) - a.rank
    name = a.name
    if lead:
        name = g.op("Unsqueeze", a, g.ints(range(lead)))
    return g.op("Tile", name, g.shape(repeats))


@lowers(aten.constant_pad_nd.default)
def constant_pad_nd(g: Graph, a: Value, pad: Sequence[Dim], value: Scalar = 0) -> str:
    begins: list[Dim] = [0] * a.rank
    ends: list[Dim] = [0] * a.rank
    for i in range(len(pad) // 2):
        begins[a.rank - 1 - i] = pad[2 * i]
        ends[a.rank - 1 - i] = pad[2 * i + 1]
    return g.op("Pad", a, g.shape([*begins, *ends]), g.scalar(value, a.dtype))


def _triangle(upper: int) -> Any:
    def lower(g: Graph, a: Value, diagonal: int = 0) -> str:
        offset = g.scalar(diagonal, torch.int64)
        if a.dtype == torch.bool:
            number = g.op("Trilu", g.cast(a, torch.float32), offset, upper=upper)
            return g.cast(number, torch.bool)
        return g.op("Trilu", a, offset, upper=upper)

    return lower


lowers(aten.tril.default)(_triangle(upper=0))
lowers(aten.triu.default)(_triangle(upper=1))


# Tensors made from numbers: fills, ranges, and constants of the model.

aten = torch.ops.aten


@lowers(aten.full.default)
def full(g: Graph, out: Any, sizes: Any, value: Scalar) -> str:
    if isinstance(value, torch.SymInt):
        return g.op("Expand", g.cast(g.dim(value), out.dtype), g.shape(out.shape))
    return g.full(out.shape, value, out.dtype)


@lowers(aten.full_like.default, aten.new_full.default)
def full_like(g: Graph, out: Any, a: Value, *rest: Any) -> str:
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
def zeros(g: Graph, out: Any, *args: Any) -> str:
    return g.full(out.shape, 0, out.dtype)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(g: Graph, out: Any, *args: Any) -> str:
    return g.full(out.shape, 1, out.dtype)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(g: Graph, out: Any, value: Scalar | Dim) -> str:
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
def arange(g: Graph, out: Any, *bounds: Any) -> str:
    start, end, step, *_ = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)
    if fixed(step) == 1 and not any(isinstance(each, float) for each in (start, end)):
        g.at_least_zero(expression(end - start))
    return arange_between(g, start, end, step, out)


@lowers(aten.eye.default, aten.eye.m)
def eye(g: Graph, out: Any, *sizes: Any) -> str:
    rows, columns = (fixed(size) for size in out.shape)
    if rows is not None and columns is not None:
        return g.constant(np.eye(rows, columns, dtype=NUMPY_DTYPE[out.dtype]))
    line = arange_between(g, 0, out.shape[0], 1, torch.empty(0, dtype=torch.int64))
    other = arange_between(g, 0, out.shape[1], 1, torch.empty(0, dtype=torch.int64))
    equal = g.op("Equal", g.op("Unsqueeze", line, g.ints([1])), other)
    return g.cast(equal, out.dtype)


def _triangle_indices(make: Callable[..., torch.Tensor]) -> Any:
    def lower(g: Graph, out: Any, rows: Dim, columns: Dim, offset: int = 0) -> str:
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
