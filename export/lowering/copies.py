"""Selection by a mask, casts, copies and fills."""

from __future__ import annotations

from typing import Any

import torch

from export.lowering.elementwise import Operand, full_shape, operands
from export.lowering.graph import Graph, Value
from export.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.where.self)
def where(g: Graph, out: Any, condition: Value, a: Operand, b: Operand) -> str:
    left, right = operands(g, tuple(out.shape), [a, b], out.dtype)
    return g.op("Where", condition, left, right)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(g: Graph, out: Any, a: Value, mask: Value, value: Operand) -> str:
    filler = g.cast(value, out.dtype) if isinstance(value, Value) else g.scalar(value, out.dtype)
    return g.op("Where", mask, filler, a)


@lowers(aten._to_copy.default)
def to_copy(
    g: Graph,
    out: Any,
    a: Value,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> str:
    if a.dtype.is_floating_point and out.dtype == torch.bool:
        return g.op("Not", g.op("Equal", a, g.scalar(0, a.dtype)))
    return g.cast(a, out.dtype)


@lowers(
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.contiguous.default,
    aten.positive.default,
)
def identity(g: Graph, out: Any, a: Value, *, memory_format: Any = None) -> str:
    return a.name


@lowers(aten.copy.default)
def copy(g: Graph, out: Any, a: Value, source: Value, non_blocking: bool = False) -> str:
    name = g.cast(source, out.dtype)
    if full_shape(source, tuple(out.shape)):
        return name
    return g.op("Expand", name, g.shape(out.shape))


@lowers(aten.fill.Scalar, aten.fill.Tensor)
def fill(g: Graph, out: Any, a: Value, value: Operand) -> str:
    if isinstance(value, Value):
        return g.op("Expand", g.cast(value, out.dtype), g.shape(out.shape))
    return g.full(out.shape, value, out.dtype)


@lowers(aten.zero.default)
def zero(g: Graph, out: Any, a: Value) -> str:
    return g.full(out.shape, 0, out.dtype)
