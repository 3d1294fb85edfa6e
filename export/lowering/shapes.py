"""Views, permutations, joins, padding, repeats: operators that move whole tensors unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from export.lowering.channels import (
    exchanged,
    held_first,
    is_line,
    is_small_image,
    other_axis,
    swapped,
    with_first,
)
from export.lowering.graph import Graph, Scalar, Value
from export.lowering.registry import lowers
from export.symbols import Dim, fixed, same_shape

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
def expand(g: Graph, out: Any, a: Value, sizes: Any, *, implicit: bool = False) -> str:
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
def permute(g: Graph, out: Any, a: Value, order: Sequence[int]) -> str:
    return transpose_order(g, a, order)


@lowers(aten.transpose.int)
def transpose(g: Graph, out: Any, a: Value, first: int, second: int) -> str:
    order = list(range(a.rank))
    order[first], order[second] = order[second], order[first]
    return transpose_order(g, a, order)


@lowers(aten.t.default)
def t(g: Graph, out: Any, a: Value) -> str:
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
def repeat(g: Graph, out: Any, a: Value, repeats: Sequence[Dim]) -> str:
    lead = len(repeats) - a.rank
    name = a.name
    if lead:
        name = g.op("Unsqueeze", a, g.ints(range(lead)))
    return g.op("Tile", name, g.shape(repeats))


@lowers(aten.constant_pad_nd.default)
def constant_pad_nd(g: Graph, out: Any, a: Value, pad: Sequence[Dim], value: Scalar = 0) -> str:
    begins: list[Dim] = [0] * a.rank
    ends: list[Dim] = [0] * a.rank
    for i in range(len(pad) // 2):
        begins[a.rank - 1 - i] = pad[2 * i]
        ends[a.rank - 1 - i] = pad[2 * i + 1]
    return g.op("Pad", a, g.shape([*begins, *ends]), g.scalar(value, a.dtype))


def _triangle(upper: int) -> Any:
    def lower(g: Graph, out: Any, a: Value, diagonal: int = 0) -> str:
        offset = g.scalar(diagonal, torch.int64)
        if a.dtype == torch.bool:
            number = g.op("Trilu", g.cast(a, torch.float32), offset, upper=upper)
            return g.cast(number, torch.bool)
        return g.op("Trilu", a, offset, upper=upper)

    return lower


lowers(aten.tril.default)(_triangle(upper=0))
lowers(aten.triu.default)(_triangle(upper=1))
