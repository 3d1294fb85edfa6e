"""Elementwise arithmetic on two tensors, and the operands that all elementwise lowerings share."""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from export.lowering.graph import Graph, Number, Scalar, Tensorish, Value
from export.lowering.registry import lowers
from export.symbols import Dim, same, same_shape

aten = torch.ops.aten

Operand = Value | Scalar


def full_shape(value: Operand, shape: tuple[Dim, ...]) -> bool:
    return isinstance(value, Value) and same_shape(value.shape, shape)


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
            names.append(_lined_up(g, g.scalar(value, dtype), shape))
            continue
        if value.rank == 0:
            names.append(_lined_up(g, g.cast(value, dtype), shape))
            continue
        producer = g.producer.get(value.name)
        others = any(full for i, full in enumerate(is_full) if i != index)
        if producer is not None and producer.op_type == "Expand" and others:
            names.append(_cast_name(g, producer.input[0], value.dtype, dtype))
            is_full[index] = False
        else:
            names.append(g.cast(value, dtype))
    return names


def _lined_up(g: Graph, scalar: str, shape: tuple[Dim, ...]) -> str:
    """A 0-d number beside a tensor of ``shape``.

    onnxruntime 1.31 takes a tensor whose last axes have size 1 element by element beside a 0-d
    number, and whole beside one of as many axes: 4.0 ms and 0.04 for [1280, 320, 1, 1].
    """
    if len(shape) < 2 or not same(shape[-1], 1):
        return scalar
    number = g.array(scalar)
    if number is not None:
        return g.constant(number.reshape([1] * len(shape)))
    return g.op("Reshape", scalar, g.ints([1] * len(shape)))


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
        if len(out.shape) > 0:
            numbers = [_repeated(g, value, out.dtype) for value in (a, b)]
            if None not in numbers:
                return g.op("Expand", g.op(op_type, *numbers), g.shape(out.shape))
        left, right = operands(g, tuple(out.shape), [a, b], out.dtype)
        if op_type in ("Mul", "Div") and _is_one(g, right) and full_shape(a, tuple(out.shape)):
            return left
        if op_type == "Mul" and _is_one(g, left) and full_shape(b, tuple(out.shape)):
            return right
        return g.op(op_type, left, right)

    return lower


def _repeated(g: Graph, value: Operand, dtype: torch.dtype) -> str | None:
    """The number that all elements are, or None where they may differ: a mean's gradient is one."""
    if not isinstance(value, Value):
        return g.scalar(value, dtype)
    if value.rank == 0:
        return g.cast(value, dtype)
    producer = g.producer.get(value.name)
    if producer is None or producer.op_type != "Expand":
        return None
    number = producer.input[0]
    array = g.array(number)
    shape = g.shapes.get(number) if array is None else array.shape
    return _cast_name(g, number, value.dtype, dtype) if shape == () else None


def _is_one(g: Graph, name: str) -> bool:
    """Whether a value is the number 1: the gradient of the loss by itself, for one."""
    array = g.array(name)
    return array is not None and array.size == 1 and bool(array.item() == 1)


def _times(value: Scalar, factor: Number) -> Scalar:
    product: Scalar = value * factor  # type: ignore[operator]
    return product


def _scaled(g: Graph, value: Value, factor: Scalar, dtype: torch.dtype) -> str:
    return g.op("Mul", *operands(g, value.shape, [value, factor], dtype))


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


# Functions of one tensor: roots, exponentials, activations, powers, clamps.


def _unary(op_type: str) -> Any:
    def lower(g: Graph, out: Any, a: Value) -> str:
        return g.op(op_type, g.cast(a, out.dtype))

    return lower


# ONNX has these by the same names.
for _name in (
    "neg", "abs", "exp", "log", "sqrt", "reciprocal", "sigmoid", "tanh", "erf", "sin", "cos", "tan",
    "atan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "sign", "floor", "ceil",
    "round",
):  # fmt: skip
    lowers(getattr(aten, _name).default)(_unary(_name.capitalize()))


def _test(op_type: str) -> Any:
    return lambda g, a: g.op(op_type, a)


lowers(aten.isnan.default)(_test("IsNaN"))
lowers(aten.isinf.default)(_test("IsInf"))


@lowers(aten.relu.default)
def relu(g: Graph, a: Value) -> str:
    # onnxruntime has none for whole numbers.
    return g.op("Relu", a) if a.dtype.is_floating_point else g.op("Max", a, g.scalar(0, a.dtype))


@lowers(aten.rsqrt.default)
def rsqrt(g: Graph, out: Any, a: Value) -> str:
    return g.op("Reciprocal", g.op("Sqrt", g.cast(a, out.dtype)))


@lowers(aten.log1p.default)
def log1p(g: Graph, out: Any, a: Value) -> str:
    # log(1 + x) loses x's low bits near zero; x * log(u) / (u - 1) with u = fl(1 + x) gives
    # them back (Kahan; Higham, Accuracy and Stability, section 1.14.1).
    one = g.scalar(1, out.dtype)
    x = g.cast(a, out.dtype)
    u = g.op("Add", x, one)
    gap = g.op("Sub", u, one)
    tiny = g.op("Equal", gap, g.scalar(0, out.dtype))
    infinite = g.op("IsInf", u)
    safe = g.op("Where", g.op("Or", tiny, infinite), one, gap)
    ratio = g.op("Div", g.op("Mul", x, g.op("Log", u)), safe)
    return g.op("Where", tiny, x, g.op("Where", infinite, g.op("Log", u), ratio))


@lowers(aten.expm1.default)
def expm1(g: Graph, out: Any, a: Value) -> str:
    # exp(x) - 1 = 2 sinh(x/2) exp(x/2): no cancellation near zero.
    half = g.op("Mul", g.cast(a, out.dtype), g.scalar(0.5, out.dtype))
    product = g.op("Mul", g.op("Sinh", half), g.op("Exp", half))
    return g.op("Mul", product, g.scalar(2, out.dtype))


# Above the usual threshold (20) torch's softplus is x itself: 2e-9 off the exact value, below
# float32's resolution there, so the exact forms serve for both. Lower thresholds show.
_THRESHOLD = 20


@lowers(aten.softplus.default)
def softplus(g: Graph, out: Any, a: Value, beta: Scalar = 1, threshold: Scalar = 20) -> str:
    scaled = a.name if beta == 1 else g.op("Mul", a, g.scalar(beta, out.dtype))
    result = g.op("Softplus", scaled)
    if beta != 1:
        result = g.op("Div", result, g.scalar(beta, out.dtype))
    if threshold >= _THRESHOLD:
        return result
    return g.op("Where", g.op("Greater", scaled, g.scalar(threshold, out.dtype)), a, result)


@lowers(aten.softplus_backward.default)
def softplus_backward(
    g: Graph, out: Any, grad: Value, a: Value, beta: Scalar, threshold: Scalar
) -> str:
    x = a.name if beta == 1 else g.op("Mul", a, g.scalar(beta, out.dtype))
    curve = g.op("Sigmoid", x)
    if threshold < _THRESHOLD:
        above = g.op("Greater", x, g.scalar(threshold, out.dtype))
        curve = g.op("Where", above, g.scalar(1, out.dtype), curve)
    slope = Value(curve, out.dtype, tuple(out.shape))
    left, right = operands(g, tuple(out.shape), [grad, slope], out.dtype)
    return g.op("Mul", left, right)


@lowers(aten.gelu.default)
def gelu(g: Graph, a: Value, *, approximate: str = "none") -> str:
    return g.op("Gelu", a, approximate=approximate)


@lowers(aten.pow.Tensor_Scalar)
def pow_scalar(g: Graph, out: Any, a: Value, exponent: Scalar) -> str:
    x = g.cast(a, out.dtype)
    exact: dict[float, Any] = {
        0.0: lambda: g.full(out.shape, 1, out.dtype),
        0.5: lambda: g.op("Sqrt", x),
        1.0: lambda: x,
        2.0: lambda: g.op("Mul", x, x),
        3.0: lambda: g.op("Mul", g.op("Mul", x, x), x),
        -0.5: lambda: g.op("Reciprocal", g.op("Sqrt", x)),
        -1.0: lambda: g.op("Reciprocal", x),
    }
    if out.dtype.is_floating_point or exponent in (0, 1, 2, 3):
        shortcut = exact.get(float(exponent))
        if shortcut is not None:
            return str(shortcut())
    return g.op("Pow", x, g.scalar(exponent, out.dtype))


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(g: Graph, out: Any, a: Operand, b: Operand) -> str:
    left, right = operands(g, tuple(out.shape), [a, b], out.dtype)
    return g.op("Pow", left, right)


_CLIPPED = (torch.float32, torch.float64, torch.int32, torch.int64)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(g: Graph, out: Any, a: Value, low: Any = None, high: Any = None) -> str:
    x = g.cast(a, out.dtype)
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float))
    if numbers and low <= high and out.dtype in _CLIPPED:
        # One pass in place of two; where low is above high, torch gives high and ONNX low.
        return g.op("Clip", x, g.scalar(low, out.dtype), g.scalar(high, out.dtype))
    for bound, op_type in ((low, "Max"), (high, "Min")):
        if bound is not None:
            x = g.op(op_type, x, *operands(g, tuple(out.shape), [bound], out.dtype))
    return x


@lowers(aten.hardtanh.default)
def hardtanh(g: Graph, out: Any, a: Value, low: Scalar = -1, high: Scalar = 1) -> str:
    return clamp(g, out, a, low, high)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(g: Graph, out: Any, a: Value, low: Any) -> str:
    return clamp(g, out, a, low, None)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(g: Graph, out: Any, a: Value, high: Any) -> str:
    return clamp(g, out, a, None, high)


# Comparisons, logic and bits.


def _comparison(op_type: str, *, negate: bool = False) -> Any:
    def lower(g: Graph, out: Any, a: Value, b: Operand) -> str:
        if isinstance(b, Value):
            dtype = torch.promote_types(a.dtype, b.dtype)
        else:
            dtype = torch.result_type(torch.empty(1, dtype=a.dtype), cast(Number, b))
        if dtype == torch.bool and op_type != "Equal":
            dtype = torch.int32
        left, right = operands(g, tuple(out.shape), [a, b], dtype)
        result = g.op(op_type, left, right)
        return g.op("Not", result) if negate else result

    return lower


for _name, _onnx_name, _negate in (
    ("eq", "Equal", False),
    ("ne", "Equal", True),
    ("lt", "Less", False),
    ("le", "LessOrEqual", False),
    ("gt", "Greater", False),
    ("ge", "GreaterOrEqual", False),
):
    _packet = getattr(aten, _name)
    lowers(_packet.Tensor, _packet.Scalar)(_comparison(_onnx_name, negate=_negate))


def _logical(op_type: str) -> Any:
    def lower(g: Graph, out: Any, a: Value, b: Operand) -> str:
        left, right = operands(g, tuple(out.shape), [a, b], torch.bool)
        return g.op(op_type, left, right)

    return lower


def _bitwise(onnx_bool: str, onnx_int: str) -> Any:
    def lower(g: Graph, out: Any, a: Operand, b: Operand) -> str:
        left, right = operands(g, tuple(out.shape), [a, b], out.dtype)
        return g.op(onnx_bool if out.dtype == torch.bool else onnx_int, left, right)

    return lower


for _name in ("and", "or", "xor"):
    _title = _name.capitalize()
    lowers(getattr(aten, f"logical_{_name}").default)(_logical(_title))
    _packet = getattr(aten, f"bitwise_{_name}")
    lowers(_packet.Tensor, _packet.Scalar)(_bitwise(_title, f"Bitwise{_title}"))


@lowers(aten.logical_not.default)
def logical_not(g: Graph, a: Value) -> str:
    return g.op("Not", g.cast(a, torch.bool))


@lowers(aten.bitwise_not.default)
def bitwise_not(g: Graph, a: Value) -> str:
    return g.op("Not" if a.dtype == torch.bool else "BitwiseNot", a)


# Mathematical functions that ONNX has no operator for, from those that it has.


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
def trunc(g: Graph, a: Value) -> str:
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


# Selection by a mask, casts, copies and fills.


@lowers(aten.where.self)
def where(g: Graph, out: Any, condition: Value, a: Operand, b: Operand) -> str:
    left, right = operands(g, tuple(out.shape), [a, b], out.dtype)
    return chosen(g, out.dtype, condition, left, right)


def chosen(
    g: Graph, dtype: torch.dtype, condition: Value, left: Tensorish, right: Tensorish
) -> str:
    """Where; onnxruntime has none of truth values, nor of short whole numbers."""
    if dtype not in (torch.bool, torch.int8, torch.int16):
        return g.op("Where", condition, left, right)
    wide = [g.cast(side, torch.int32) for side in (left, right)]
    return g.cast(g.op("Where", condition, *wide), dtype)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(g: Graph, out: Any, a: Value, mask: Value, value: Operand) -> str:
    filler = g.cast(value, out.dtype) if isinstance(value, Value) else g.scalar(value, out.dtype)
    return chosen(g, out.dtype, mask, filler, a)


@lowers(aten._to_copy.default)
def to_copy(g: Graph, out: Any, a: Value) -> str:
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
def identity(g: Graph, a: Value) -> str:
    return a.name


@lowers(aten.copy.default)
def copy(g: Graph, out: Any, a: Value, source: Operand) -> str:
    if not isinstance(source, Value):
        return g.full(out.shape, source, out.dtype)
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
