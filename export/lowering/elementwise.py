"""Elementwise arithmetic on two tensors, and the operands that all elementwise lowerings share."""

from __future__ import annotations

from typing import Any

import torch

from export.lowering.graph import Dim, Graph, Number, Scalar, Value, same
from export.lowering.registry import lowers

aten = torch.ops.aten

Operand = Value | Scalar


def full_shape(value: Operand, shape: tuple[Dim, ...]) -> bool:
    return (
        isinstance(value, Value)
        and len(value.shape) == len(shape)
        and all(same(a, b) for a, b in zip(value.shape, shape, strict=True))
    )


def operands(
    g: Graph, shape: tuple[Dim, ...], values: list[Operand], dtype: torch.dtype
) -> list[str]:
    """The operands' names in one dtype, with needless Expands looked through.

    ONNX's elementwise operators broadcast by themselves, so an Expand is only needed where no
    other operand has the full shape.
    """
    names: list[str] = []
    is_full = [full_shape(value, shape) for value in values]
    for index, value in enumerate(values):
        if not isinstance(value, Value):
            names.append(g.scalar(value, dtype))
            continue
        producer = g.producer.get(value.name)
        others = any(full for i, full in enumerate(is_full) if i != index)
        if producer is not None and producer.op_type == "Expand" and others:
            names.append(_cast_name(g, producer.input[0], value.dtype, dtype))
            is_full[index] = False
        else:
            names.append(g.cast(value, dtype))
    return names


def _cast_name(g: Graph, name: str, have: torch.dtype, want: torch.dtype) -> str:
    return name if have == want else g.cast(name, want)


# torch's arithmetic on truth values, for which ONNX's operators are not defined.
_OF_TRUTHS = {"Add": "Or", "Mul": "And", "Max": "Or", "Min": "And"}


def _binary(op_type: str) -> Any:
    def lower(g: Graph, out: Any, a: Operand, b: Operand, *, alpha: Number = 1) -> str:
        if out.dtype == torch.bool:
            return g.op(_OF_TRUTHS[op_type], *operands(g, tuple(out.shape), [a, b], torch.bool))
        if alpha != 1:
            b = (
                Value(_scaled(g, b, alpha, out.dtype), out.dtype, b.shape)
                if isinstance(b, Value)
                else _times(b, alpha)
            )
        left, right = operands(g, tuple(out.shape), [a, b], out.dtype)
        if op_type in ("Mul", "Div") and _is_one(g, right) and full_shape(a, tuple(out.shape)):
            return left
        if op_type == "Mul" and _is_one(g, left) and full_shape(b, tuple(out.shape)):
            return right
        return g.op(op_type, left, right)

    return lower


def _is_one(g: Graph, name: str) -> bool:
    """Whether a value is the number 1: the gradient of the loss by itself, for one."""
    array = g.array(name)
    return array is not None and array.ndim == 0 and bool(array == 1)


def _times(value: Scalar, factor: Number) -> Scalar:
    product: Scalar = value * factor  # type: ignore[operator]
    return product


def _scaled(g: Graph, value: Value, factor: Scalar, dtype: torch.dtype) -> str:
    return g.op("Mul", g.cast(value, dtype), g.scalar(factor, dtype))


for _aten, _onnx in {
    (aten.add.Tensor, aten.add.Scalar): "Add",
    (aten.sub.Tensor, aten.sub.Scalar): "Sub",
    (aten.mul.Tensor, aten.mul.Scalar): "Mul",
    (aten.div.Tensor, aten.div.Scalar): "Div",
    (aten.maximum.default,): "Max",
    (aten.minimum.default,): "Min",
}.items():
    lowers(*_aten)(_binary(_onnx))


@lowers(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(g: Graph, out: Any, a: Value, b: Operand, alpha: Scalar = 1) -> str:
    if alpha != 1:
        a = Value(_scaled(g, a, alpha, out.dtype), out.dtype, a.shape)
    left, right = operands(g, tuple(out.shape), [b, a], out.dtype)
    return g.op("Sub", left, right)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(g: Graph, out: Any, a: Operand, b: Operand, *, rounding_mode: str | None) -> str:
    left, right = operands(g, tuple(out.shape), [a, b], out.dtype)
    quotient = g.op("Div", left, right)
    if rounding_mode is None:
        return quotient
    if out.dtype.is_floating_point:
        if rounding_mode == "floor":
            return g.op("Floor", quotient)
        positive = g.op("Floor", g.op("Abs", quotient))
        return g.op("Mul", positive, g.op("Sign", quotient))
    if rounding_mode == "trunc":
        return quotient
    # ONNX divides whole numbers towards zero; floor is one less where a remainder has the
    # divisor's opposite sign.
    remainder = g.op("Sub", left, g.op("Mul", quotient, right))
    zero = g.scalar(0, out.dtype)
    inexact = g.op("Not", g.op("Equal", remainder, zero))
    opposite = g.op("Xor", g.op("Less", remainder, zero), g.op("Less", right, zero))
    return g.op("Sub", quotient, g.cast(g.op("And", inexact, opposite), out.dtype))


@lowers(aten.floor_divide.default)
def floor_divide(g: Graph, out: Any, a: Operand, b: Operand) -> str:
    return div_mode(g, out, a, b, rounding_mode="floor")


@lowers(aten.remainder.Scalar, aten.remainder.Tensor)
def remainder(g: Graph, out: Any, a: Operand, b: Operand) -> str:
    left, right = operands(g, tuple(out.shape), [a, b], out.dtype)
    if not out.dtype.is_floating_point:
        return g.op("Mod", left, right)
    floor = g.op("Floor", g.op("Div", left, right))
    return g.op("Sub", left, g.op("Mul", floor, right))


@lowers(aten.fmod.Scalar, aten.fmod.Tensor)
def fmod(g: Graph, out: Any, a: Operand, b: Operand) -> str:
    left, right = operands(g, tuple(out.shape), [a, b], out.dtype)
    return g.op("Mod", left, right, fmod=1)
