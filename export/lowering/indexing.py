"""Lookups by index and their gradients.

Operators that take no negative index in torch say so with ``Graph.from_zero``; those of brackets
(``x[i]``) count from the end, as ONNX's do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from export.errors import ExportError
from export.lowering.channels import exchanged, held_first, other_axis
from export.lowering.elementwise import div_mode
from export.lowering.graph import Graph, Value
from export.lowering.registry import lowers
from export.lowering.shapes import transpose_order
from export.symbols import Dim, expression, fixed, same, same_shape

aten = torch.ops.aten


@lowers(aten.embedding.default)
def embedding(g: Graph, weight: Value, indices: Value) -> str:
    g.from_zero(indices)
    return g.op("Gather", weight, indices, axis=0)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    g: Graph, out: Any, grad: Value, indices: Value, *, settings: Mapping[str, Any]
) -> str:
    padding_idx = settings["padding_idx"]
    if settings["scale_grad_by_freq"]:
        raise ExportError(
            "an embedding's gradient scaled by frequency",
            operator="aten.embedding_dense_backward",
            instead="scale_grad_by_freq=False",
        )
    rows: Value | str = grad
    if padding_idx >= 0:
        keep = g.op("Equal", indices, g.scalar(padding_idx, indices.dtype))
        mask = g.op("Unsqueeze", keep, g.ints([-1]))
        rows = g.op("Where", mask, g.scalar(0, grad.dtype), grad)
    width = fixed(out.shape[1])
    shape = g.shape([-1, out.shape[1]]) if width is None else g.ints([-1, width])
    flat = g.op("Reshape", rows, shape)
    return scatter_rows(g, out, flat, indices)


def scatter_rows(g: Graph, out: Any, rows: str, indices: Value) -> str:
    """Zeros of ``out``'s shape with each row added at its index."""
    where = g.op("Reshape", g.cast(indices, torch.int64), g.ints([-1, 1]))
    return add_rows(g, g.zeros(out.shape, out.dtype), where, rows, out.dim())


def add_rows(g: Graph, data: str, where: str, rows: str, rank: int) -> str:
    """``data`` [n, ...] of this rank with ``rows`` [m, ...] added at the indices [m, 1]."""
    if not g.several_threads:
        return g.op("ScatterND", data, where, rows, reduction="add")
    lead = g.op("Reshape", where, g.ints([-1, *[1] * (rank - 1)]))
    index = g.op("Expand", lead, g.op("Shape", rows))
    return g.op("ScatterElements", data, index, rows, axis=0, reduction="add")


@lowers(aten.index_select.default)
def index_select(g: Graph, a: Value, dim: int, index: Value) -> str:
    g.from_zero(index)
    return g.op("Gather", a, index, axis=dim)


@lowers(aten.gather.default)
def gather(g: Graph, a: Value, dim: int, index: Value) -> str:
    g.from_zero(index)
    return g.op("GatherElements", a, index, axis=dim)


@lowers(aten.scatter_add.default)
def scatter_add(g: Graph, out: Any, a: Value, dim: int, index: Value, source: Value) -> str:
    g.from_zero(index)
    return _scatter(g, out, a, dim, index, source, "add")


# ONNX's names of torch's reductions, and the number that changes nothing under each.
_REDUCTIONS: dict[str, tuple[str, float]] = {
    "sum": ("add", 0),
    "mean": ("add", 0),
    "prod": ("mul", 1),
    "amax": ("max", -math.inf),
    "amin": ("min", math.inf),
}


def _neutral(reduce: str, dtype: torch.dtype) -> float | int:
    number = _REDUCTIONS[reduce][1]
    if dtype.is_floating_point or math.isfinite(number):
        return number
    return torch.iinfo(dtype).min if number < 0 else torch.iinfo(dtype).max


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    g: Graph,
    out: Any,
    a: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> str:
    g.from_zero(index)
    start = a
    if not include_self:
        fill = g.full(index.shape, _neutral(reduce, out.dtype), out.dtype)
        name = _scatter(g, out, a, dim, index, Value(fill, out.dtype, index.shape))
        start = Value(name, out.dtype, a.shape)
    result = _scatter(g, out, start, dim, index, source, _REDUCTIONS[reduce][0])
    if reduce != "mean":
        return result
    ones = Value(g.full(index.shape, 1, out.dtype), out.dtype, index.shape)
    first = g.full(a.shape, 1 if include_self else 0, out.dtype)
    count = _scatter(g, out, Value(first, out.dtype, a.shape), dim, index, ones, "add")
    divisor = g.op("Max", count, g.scalar(1, out.dtype))
    sums, counts = (Value(name, out.dtype, a.shape) for name in (result, divisor))
    return div_mode(
        g, out, sums, counts, rounding_mode=None if out.dtype.is_floating_point else "floor"
    )


@lowers(aten.index_reduce.default)
def index_reduce(
    g: Graph,
    out: Any,
    a: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> str:
    column = g.op("Unsqueeze", index, g.ints(i for i in range(a.rank) if i != dim % a.rank))
    places = g.op("Expand", column, g.shape(source.shape))
    g.from_zero(index)
    wide = Value(places, index.dtype, source.shape)
    return scatter_reduce(g, out, a, dim, wide, source, reduce, include_self=include_self)


def _scatter(
    g: Graph, out: Any, a: Value, dim: int, index: Value, source: Value, reduction: str = "none"
) -> str:
    """ScatterElements; as in torch, only the part of the source that the index covers is read."""
    name = g.cast(source, out.dtype)
    covered = zip(source.shape, index.shape, strict=True)
    for axis, (size, wanted) in enumerate(covered):
        if not same(size, wanted):
            name = slice_axis(g, name, axis, 0, wanted)
    return g.op("ScatterElements", a, index, name, axis=dim, reduction=reduction)


@lowers(aten.scatter.src)
def scatter_src(g: Graph, out: Any, a: Value, dim: int, index: Value, source: Value) -> str:
    g.from_zero(index)
    return _scatter(g, out, a, dim, index, source)


@lowers(aten.scatter.value)
def scatter_value(g: Graph, out: Any, a: Value, dim: int, index: Value, value: Any) -> str:
    filled = g.full(index.shape, value, out.dtype)
    return scatter_src(g, out, a, dim, index, Value(filled, out.dtype, index.shape))


@lowers(aten.index_add.default)
def index_add(g: Graph, a: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> str:
    g.from_zero(index)
    name = source.name if alpha == 1 else g.op("Mul", source, g.scalar(alpha, source.dtype))
    dim = dim % a.rank
    order = [dim, *(i for i in range(a.rank) if i != dim)]
    back = [order.index(i) for i in range(a.rank)]
    moved = transpose_order(g, a, order)
    rows = transpose_order(g, Value(name, source.dtype, source.shape), order)
    where = g.op("Reshape", g.cast(index, torch.int64), g.ints([-1, 1]))
    added = add_rows(g, moved, where, rows, a.rank)
    return g.op("Transpose", added, perm=back) if dim else added


def _leading(
    g: Graph, a: Value, indices: Sequence[Value | None]
) -> tuple[str, str, list[int], int, int]:
    """Indexed axes moved to the front, and their indices as one int64 tensor [..., count].

    Then those axes, the indices' rank and where torch puts them in the result: in the place of
    axes that are next to each other, else at the front.
    """
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    chosen = [index for index in indices if index is not None]
    if any(index.dtype == torch.bool for index in chosen):
        raise ExportError("a mask as an index", instead="torch.where(mask, values, x)")
    order = [*axes, *(i for i in range(a.rank) if i not in axes)]
    moved = transpose_order(g, a, order)
    names = [g.cast(index, torch.int64) for index in chosen]
    if len(names) > 1:
        shape: Any = torch.broadcast_shapes(*[tuple(index.shape) for index in chosen])
        names = [g.op("Expand", name, g.shape(shape)) for name in names]
    parts = [g.op("Unsqueeze", name, g.ints([-1])) for name in names]
    joined = parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=-1)
    rank = max(index.rank for index in chosen)
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    return moved, joined, axes, rank, axes[0] if together else 0


@lowers(aten.index.Tensor)
def index(g: Graph, out: Any, a: Value, indices: Sequence[Value | None]) -> str:
    chosen = [(axis, value) for axis, value in enumerate(indices) if value is not None]
    if len(chosen) == 1:
        axis, value = chosen[0]
        return g.op("Gather", a, value, axis=axis)
    moved, where, _, rank, place = _leading(g, a, indices)
    gathered = g.op("GatherND", moved, where)
    order = [*range(rank, rank + place), *range(rank), *range(rank + place, out.dim())]
    if order == list(range(out.dim())):
        return gathered
    return g.op("Transpose", gathered, perm=order)


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    g: Graph,
    a: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> str:
    moved, where, axes, rank, place = _leading(g, a, indices)
    chosen = [v for v in indices if v is not None]
    lead = list(torch.broadcast_shapes(*[tuple(v.shape) for v in chosen]))
    rest = [size for i, size in enumerate(a.shape) if i not in axes]
    full = [*rest[:place], *lead, *rest[place:]]
    update = _broadcast(g, values, full)
    if place:
        # torch gives [rest before, index dims, rest after]; ScatterND wants the indices first.
        order = [*range(place, place + rank), *range(place), *range(place + rank, len(full))]
        update = g.op("Transpose", update, perm=order)
    if not accumulate:
        result = g.op("ScatterND", moved, where, update)
    elif g.several_threads and len(axes) == 1:
        flat = g.shape([-1, *rest])
        where = g.op("Reshape", where, g.ints([-1, 1]))
        result = add_rows(g, moved, where, g.op("Reshape", update, flat), a.rank)
    else:
        result = g.op("ScatterND", moved, where, update, reduction="add")
    order = [*axes, *(i for i in range(a.rank) if i not in axes)]
    back = [order.index(i) for i in range(a.rank)]
    return result if back == list(range(a.rank)) else g.op("Transpose", result, perm=back)


@lowers(aten.index_copy.default)
def index_copy(g: Graph, a: Value, dim: int, index: Value, source: Value) -> str:
    g.from_zero(index)
    return index_put(g, a, [*[None] * (dim % a.rank), index], source)


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(g: Graph, out: Any, a: Value, dim: int, index: Value, value: Any) -> str:
    name = g.cast(value, out.dtype) if isinstance(value, Value) else g.scalar(value, out.dtype)
    return index_put(g, a, [*[None] * (dim % a.rank), index], Value(name, out.dtype, ()))


@lowers(aten.nonzero.default)
def nonzero(g: Graph, a: Value) -> str:
    return g.op("Transpose", g.op("NonZero", a), perm=[1, 0])


@lowers(aten._unique2.default, aten.unique_dim.default)
def unique(g: Graph, out: Any, a: Value, *, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Sorted, also where torch need not: how many there are is known at run time."""
    axis = settings["dim"] % a.rank if "dim" in settings else None
    # onnxruntime has it of few types.
    held = torch.float32 if a.dtype == torch.float32 else torch.int64
    source = g.cast(a, held)
    wanted = [True, False, settings["return_inverse"], settings["return_counts"]]
    values, _, places, numbers = g.multi("Unique", source, outputs=wanted, axis=axis, sorted=1)
    if a.dtype != held:
        values = g.cast(values, a.dtype)
    if places:
        places = g.reshape(places, out[1].shape)
    return values, places, numbers


def _broadcast(g: Graph, value: Value, shape: Sequence[Dim]) -> str:
    if same_shape(value.shape, shape):
        return value.name
    return g.op("Expand", value, g.shape(shape))


# Slices and single places along an axis: reading them, their gradients, and writing into them.

INT64_MAX = 2**63 - 1


def _bound(g: Graph, value: Dim | None, default: Dim) -> str:
    """A slice's end as int64 [1], negative ones counted from the end as in Python."""
    if value is None:
        value = default
    number = fixed(value)
    if number is not None:
        return g.ints([max(min(number, INT64_MAX), -INT64_MAX)])
    return g.dim(value)


def _from_start(place: Dim, size: Dim) -> Dim:
    """A place along an axis counted from its start, where below 0 it counts from its end.

    Which of the two a place of a free size is, tracing decided, and holds as a guard.
    """
    number = place.node.hint if isinstance(place, torch.SymInt) else place
    if number is None:
        raise ExportError(
            f"a place along an axis ({expression(place)}) depends on data",
            instead="a mask, or a place that is a batch entry by torch.gather",
        )
    return place if number >= 0 else torch.sym_max(size + place, 0)


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
    dim = dim % a.rank
    first = held_first(g, a)
    if first is not None:
        return exchanged(g, slice_axis(g, first, other_axis(dim), start, end, step), a.rank)
    return slice_axis(g, a, dim, start, end, step)


@lowers(aten.flip.default)
def flip(g: Graph, a: Value, dims: Sequence[int]) -> str:
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
def select(g: Graph, a: Value, dim: int, index: Dim) -> str:
    number = fixed(index)
    if number is not None:
        return g.op("Gather", a, g.scalar(number, torch.int64), axis=dim)
    return g.op("Gather", a, g.op("Squeeze", g.dim(index), g.ints([0])), axis=dim)


@lowers(aten.split_with_sizes.default)
def split_with_sizes(g: Graph, a: Value, sizes: Sequence[Dim], dim: int = 0) -> tuple[str, ...]:
    if len(sizes) == 1:
        return (a.name,)
    axis = dim % a.rank
    first = held_first(g, a)
    if first is None:
        return g.multi("Split", a, g.shape(sizes), outputs=len(sizes), axis=axis)
    parts = g.multi("Split", first, g.shape(sizes), outputs=len(sizes), axis=other_axis(axis))
    return tuple(exchanged(g, part, a.rank) for part in parts)


@lowers(aten.split.Tensor)
def split(g: Graph, out: Any, a: Value, size: Dim, dim: int = 0) -> tuple[str, ...]:
    return split_with_sizes(g, a, [part.shape[dim] for part in out], dim)


@lowers(aten.unbind.int)
def unbind(g: Graph, out: Any, a: Value, dim: int = 0) -> tuple[str, ...]:
    return tuple(select(g, a, dim, index) for index in range(len(out)))


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
    g: Graph, grad: Value, sizes: Sequence[Dim], dim: int, *, settings: Mapping[str, Any]
) -> str:
    dim = dim % len(sizes)
    size = sizes[dim]
    start, step = _from_start(settings["start"], size), settings["step"]
    if fixed(step) != 1:
        return _strided_slice_backward(g, grad, sizes, dim, start, step)
    end = size - start - grad.shape[dim]
    held = held_first(g, grad)
    if held is not None:
        there = other_axis(dim)
        zeros = embed_in_zeros(g, held, there, start, end, grad.dtype, grad.rank)
        return exchanged(g, zeros, grad.rank)
    return embed_in_zeros(g, grad, dim, start, end, grad.dtype, grad.rank)


def _strided_slice_backward(
    g: Graph, grad: Value, sizes: Sequence[Dim], dim: int, start: Dim, step: Dim
) -> str:
    # Interleave with zeros: [.., n, ..] -> [.., n, step, ..] -> [.., n * step, ..], then crop
    # or pad to the slice's place.
    stride = fixed(step)
    if stride is None:
        raise ExportError(
            "the gradient of a slice with a step that depends on an axis",
            operator="aten.slice_backward",
            instead="a fixed step",
        )
    length = grad.shape[dim]
    spread = g.op("Unsqueeze", grad, g.ints([dim + 1]))
    spread = embed_in_zeros(g, spread, dim + 1, 0, stride - 1, grad.dtype, grad.rank + 1)
    merged = [*grad.shape[:dim], length * stride, *grad.shape[dim + 1 :]]
    spread = g.op("Reshape", spread, g.target(merged))
    tail = sizes[dim] - start - length * stride
    number = fixed(tail)
    if number is None or number < 0:
        spread = slice_axis(g, spread, dim, 0, sizes[dim] - start)
        tail = torch.sym_max(tail, 0)
    return embed_in_zeros(g, spread, dim, start, tail, grad.dtype, grad.rank)


@lowers(aten.select_backward.default)
def select_backward(g: Graph, grad: Value, sizes: Sequence[Dim], dim: int, index: Dim) -> str:
    dim = dim % len(sizes)
    index = _from_start(index, sizes[dim])
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
    first = _from_start(0 if start is None else start, a.shape[dim])
    parts = [
        slice_axis(g, a, dim, 0, first),
        g.cast(source, out.dtype),
        slice_axis(g, a, dim, first + source.shape[dim], None),
    ]
    return g.op("Concat", *parts, axis=dim)


@lowers(aten.select_scatter.default)
def select_scatter(g: Graph, out: Any, a: Value, source: Value, dim: int, index: Dim) -> str:
    dim = dim % a.rank
    index = _from_start(index, a.shape[dim])
    parts = [
        slice_axis(g, a, dim, 0, index),
        g.op("Unsqueeze", g.cast(source, out.dtype), g.ints([dim])),
        slice_axis(g, a, dim, index + 1, None),
    ]
    return g.op("Concat", *parts, axis=dim)
