"""Slices and single places along an axis: reading them, their gradients, and writing into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from export.errors import ExportError
from export.lowering.graph import Dim, Graph, Value, fixed, same
from export.lowering.registry import lowers

aten = torch.ops.aten

INT64_MAX = 2**63 - 1


def _bound(g: Graph, value: Dim | None, default: Dim) -> str:
    """A slice's end as int64 [1], negative ones counted from the end as in Python."""
    if value is None:
        value = default
    number = fixed(value)
    if number is not None:
        return g.ints([max(min(number, INT64_MAX), -INT64_MAX)])
    return g.dim(value)


def slice_axis(
    g: Graph, a: Value | str, dim: int, start: Dim | None, end: Dim | None, step: Dim = 1
) -> str:
    """a[start:end:step] along one axis."""
    return g.op(
        "Slice",
        a,
        _bound(g, start, 0),
        _bound(g, end, INT64_MAX),
        g.ints([dim]),
        g.dim(step),
    )


@lowers(aten.slice.Tensor)
def slice_tensor(
    g: Graph,
    out: Any,
    a: Value,
    dim: int = 0,
    start: Dim | None = None,
    end: Dim | None = None,
    step: Dim = 1,
) -> str:
    if same(out.shape[dim], a.shape[dim]) and fixed(step) == 1:
        return a.name
    return slice_axis(g, a, dim % a.rank, start, end, step)


@lowers(aten.flip.default)
def flip(g: Graph, out: Any, a: Value, dims: Sequence[int]) -> str:
    count = len(dims)
    return g.op(
        "Slice",
        a,
        g.ints([-1] * count),
        g.ints([-INT64_MAX] * count),
        g.ints([dim % a.rank for dim in dims]),
        g.ints([-1] * count),
    )


@lowers(aten.select.int)
def select(g: Graph, out: Any, a: Value, dim: int, index: Dim) -> str:
    number = fixed(index)
    if number is not None:
        return g.op("Gather", a, g.scalar(number, torch.int64), axis=dim)
    return g.op("Gather", a, g.op("Squeeze", g.dim(index), g.ints([0])), axis=dim)


@lowers(aten.split_with_sizes.default)
def split_with_sizes(
    g: Graph, out: Any, a: Value, sizes: Sequence[Dim], dim: int = 0
) -> tuple[str, ...]:
    if len(sizes) == 1:
        return (a.name,)
    return g.multi("Split", a, g.shape(sizes), outputs=len(sizes), axis=dim % a.rank)


@lowers(aten.split.Tensor)
def split(g: Graph, out: Any, a: Value, size: Dim, dim: int = 0) -> tuple[str, ...]:
    return split_with_sizes(g, out, a, [part.shape[dim] for part in out], dim)


@lowers(aten.unbind.int)
def unbind(g: Graph, out: Any, a: Value, dim: int = 0) -> tuple[str, ...]:
    return tuple(select(g, None, a, dim, index) for index in range(len(out)))


def embed_in_zeros(
    g: Graph, a: Value | str, dim: int, begin: Dim, end: Dim, dtype: torch.dtype, rank: int
) -> str:
    """Zeros around ``a`` along one axis: the gradient of a slice."""
    # All axes, not Pad's axes input: onnxruntime 1.31 permutes the pads wrongly when it moves a
    # Transpose through a Pad that has one.
    begins: list[Dim] = [0] * rank
    ends: list[Dim] = [0] * rank
    begins[dim], ends[dim] = begin, end
    return g.op("Pad", a, g.shape([*begins, *ends]), g.scalar(0, dtype))


@lowers(aten.slice_backward.default)
def slice_backward(
    g: Graph, out: Any, grad: Value, sizes: Sequence[Dim], dim: int, start: Dim, end: Dim, step: Dim
) -> str:
    dim = dim % len(sizes)
    size = sizes[dim]
    if fixed(step) != 1:
        return _strided_slice_backward(g, out, grad, sizes, dim, start, step)
    first = fixed(start)
    if first is not None and first < 0:
        start = size + start
    end = size - start - grad.shape[dim]
    return embed_in_zeros(g, grad, dim, start, end, grad.dtype, grad.rank)


def _strided_slice_backward(
    g: Graph, out: Any, grad: Value, sizes: Sequence[Dim], dim: int, start: Dim, step: Dim
) -> str:
    # Interleave with zeros: [.., n, ..] -> [.., n, step, ..] -> [.., n * step, ..], then crop
    # or pad to the slice's place.
    stride, first = fixed(step), fixed(start)
    if stride is None or first is None:
        raise ExportError(
            "the gradient of a slice with a step that depends on an axis",
            operator="aten.slice_backward",
            instead="a fixed start and step",
        )
    length = grad.shape[dim]
    spread = g.op("Unsqueeze", grad, g.ints([dim + 1]))
    spread = embed_in_zeros(g, spread, dim + 1, 0, stride - 1, grad.dtype, grad.rank + 1)
    merged = [*grad.shape[:dim], length * stride, *grad.shape[dim + 1 :]]
    spread = g.op("Reshape", spread, g.target(merged))
    tail = sizes[dim] - first - length * stride
    number = fixed(tail)
    if number is None or number < 0:
        spread = slice_axis(g, spread, dim, 0, sizes[dim] - first)
        tail = 0 if number is not None else tail
    if number is None:
        raise ExportError(
            "the gradient of a slice with a step along a named axis",
            operator="aten.slice_backward",
            instead="a slice with step 1, or a fixed size along that axis",
        )
    return embed_in_zeros(g, spread, dim, first, tail, grad.dtype, grad.rank)


@lowers(aten.select_backward.default)
def select_backward(
    g: Graph, out: Any, grad: Value, sizes: Sequence[Dim], dim: int, index: Dim
) -> str:
    dim = dim % len(sizes)
    number = fixed(index)
    if number is not None and number < 0:
        index = sizes[dim] + index
    wide = g.op("Unsqueeze", grad, g.ints([dim]))
    return embed_in_zeros(g, wide, dim, index, sizes[dim] - index - 1, grad.dtype, len(sizes))


@lowers(aten.slice_scatter.default)
def slice_scatter(
    g: Graph,
    out: Any,
    a: Value,
    source: Value,
    dim: int = 0,
    start: Dim | None = None,
    end: Dim | None = None,
    step: Dim = 1,
) -> str:
    if fixed(step) != 1:
        raise ExportError(
            "writing into a slice with a step",
            operator="aten.slice_scatter",
            instead="torch.where with a mask",
        )
    dim = dim % a.rank
    first = 0 if start is None else start
    number = fixed(first)
    if number is not None and number < 0:
        first = a.shape[dim] + first
    parts = [
        slice_axis(g, a, dim, 0, first),
        g.cast(source, out.dtype),
        slice_axis(g, a, dim, first + source.shape[dim], None),
    ]
    return g.op("Concat", *parts, axis=dim)


@lowers(aten.select_scatter.default)
def select_scatter(g: Graph, out: Any, a: Value, source: Value, dim: int, index: Dim) -> str:
    dim = dim % a.rank
    number = fixed(index)
    if number is not None and number < 0:
        index = a.shape[dim] + index
    parts = [
        slice_axis(g, a, dim, 0, index),
        g.op("Unsqueeze", g.cast(source, out.dtype), g.ints([dim])),
        slice_axis(g, a, dim, index + 1, None),
    ]
    return g.op("Concat", *parts, axis=dim)
