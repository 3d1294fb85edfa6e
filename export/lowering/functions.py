"""Mathematical functions that ONNX has no operator for, from those that it has."""

from __future__ import annotations

import math
from typing import Any

import torch

from export.lowering.elementwise import Operand, operands
from export.lowering.graph import Graph, Value
from export.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.exp2.default)
def exp2(g: Graph, out: Any, a: Value) -> str:
    return g.op("Pow", g.scalar(2, out.dtype), g.cast(a, out.dtype))


def _logarithm(base: float) -> Any:
    def lower(g: Graph, out: Any, a: Value) -> str:
        natural = g.op("Log", g.cast(a, out.dtype))
        return g.op("Mul", natural, g.scalar(1 / math.log(base), out.dtype))

    return lower


lowers(aten.log2.default)(_logarithm(2))
lowers(aten.log10.default)(_logarithm(10))


@lowers(aten.trunc.default)
def trunc(g: Graph, out: Any, a: Value) -> str:
    if not a.dtype.is_floating_point:
        return a.name
    return g.op("Mul", g.op("Floor", g.op("Abs", a)), g.op("Sign", a))


@lowers(aten.round.decimals)
def round_decimals(g: Graph, out: Any, a: Value, *, decimals: int) -> str:
    # As torch does: whole powers of ten are exact, their inverses are not.
    size = g.scalar(10.0 ** abs(decimals), out.dtype)
    there, back = ("Mul", "Div") if decimals >= 0 else ("Div", "Mul")
    return g.op(back, g.op("Round", g.op(there, a, size)), size)


@lowers(aten.atan2.default)
def atan2(g: Graph, out: Any, a: Operand, b: Operand) -> str:
    """The angle of (b, a), in the right one of four quadrants (signs of zeros are not told apart).

    The smaller over the larger of the two lengths, so that nothing overflows; then reflected.
    """
    y, x = operands(g, tuple(out.shape), [a, b], out.dtype)
    zero, one = g.scalar(0, out.dtype), g.scalar(1, out.dtype)
    height, width = g.op("Abs", y), g.op("Abs", x)
    longer = g.op("Max", height, width)
    safe = g.op("Where", g.op("Equal", longer, zero), one, longer)
    angle = g.op("Atan", g.op("Div", g.op("Min", height, width), safe))
    steep = g.op("Greater", height, width)
    right = g.scalar(math.pi / 2, out.dtype)
    angle = g.op("Where", steep, g.op("Sub", right, angle), angle)
    left = g.op("Less", x, zero)
    angle = g.op("Where", left, g.op("Sub", g.scalar(math.pi, out.dtype), angle), angle)
    return g.op("Where", g.op("Less", y, zero), g.op("Neg", angle), angle)


def _shift(op: str) -> Any:
    def lower(g: Graph, out: Any, a: Value, b: Operand) -> str:
        left, right = operands(g, tuple(out.shape), [a, b], out.dtype)
        power = g.op("Pow", g.scalar(2, out.dtype), right)
        if op == "Mul":
            return g.op("Mul", left, power)
        # Downwards, as an arithmetic shift does: what floor division by a power of two gives.
        rest = g.op("Mod", left, power)
        return g.op("Div", g.op("Sub", left, rest), power)

    return lower


lowers(aten.__lshift__.Scalar, aten.__lshift__.Tensor, aten.bitwise_left_shift.Tensor)(
    _shift("Mul")
)
lowers(aten.__rshift__.Scalar, aten.__rshift__.Tensor, aten.bitwise_right_shift.Tensor)(
    _shift("Div")
)


def _place(g: Graph, out: Any, a: Value, boundaries: Value, right: bool) -> str:
    """How many boundaries lie below each value (or at it, with ``right``)."""
    wide = g.op("Unsqueeze", a, g.ints([-1]))
    below = g.op("LessOrEqual" if right else "Less", g.cast(boundaries, a.dtype), wide)
    count = g.op("ReduceSum", g.cast(below, torch.int64), g.ints([-1]), keepdims=0)
    return g.cast(Value(count, torch.int64, tuple(out.shape)), out.dtype)


@lowers(aten.bucketize.Tensor)
def bucketize(
    g: Graph, out: Any, a: Value, boundaries: Value, *, out_int32: bool = False, right: bool = False
) -> str:
    return _place(g, out, a, boundaries, right)
