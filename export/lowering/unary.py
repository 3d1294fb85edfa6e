"""Functions of one tensor: roots, exponentials, activations, powers, clamps."""

from __future__ import annotations

from typing import Any

import torch

from export.lowering.elementwise import Operand, operands
from export.lowering.graph import Graph, Scalar, Value
from export.lowering.registry import lowers

aten = torch.ops.aten


def _unary(op_type: str) -> Any:
    def lower(g: Graph, out: Any, a: Value) -> str:
        return g.op(op_type, g.cast(a, out.dtype))

    return lower


for _name, _onnx_name in {
    "neg": "Neg",
    "abs": "Abs",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "reciprocal": "Reciprocal",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "erf": "Erf",
    "sin": "Sin",
    "cos": "Cos",
    "tan": "Tan",
    "atan": "Atan",
    "asin": "Asin",
    "acos": "Acos",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "asinh": "Asinh",
    "acosh": "Acosh",
    "atanh": "Atanh",
    "sign": "Sign",
    "floor": "Floor",
    "ceil": "Ceil",
    "round": "Round",
    "relu": "Relu",
}.items():
    lowers(getattr(aten, _name).default)(_unary(_onnx_name))


@lowers(aten.isnan.default)
def isnan(g: Graph, out: Any, a: Value) -> str:
    return g.op("IsNaN", a)


@lowers(aten.isinf.default)
def isinf(g: Graph, out: Any, a: Value) -> str:
    return g.op("IsInf", a)


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
def gelu(g: Graph, out: Any, a: Value, *, approximate: str = "none") -> str:
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


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(g: Graph, out: Any, a: Value, low: Any = None, high: Any = None) -> str:
    x = g.cast(a, out.dtype)
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
