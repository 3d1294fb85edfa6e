"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch

from export.lowering.graph import Graph, Scalar, Value
from export.lowering.registry import lowers

aten = torch.ops.aten


def _untransposed(g: Graph, value: Value) -> tuple[str, int]:
    """A matrix and whether Gemm must transpose it: a Transpose before a product costs a copy."""
    producer = g.producer.get(value.name)
    if producer is not None and producer.op_type == "Transpose":
        order = list(producer.attribute[0].ints)
        if order == [1, 0]:
            return producer.input[0], 1
    return value.name, 0


def gemm(
    g: Graph,
    a: Value,
    b: Value,
    bias: Value | None = None,
    alpha: Scalar = 1.0,
    beta: Scalar = 1.0,
) -> str:
    """alpha * a @ b + beta * bias, with transposes folded into the product."""
    left, left_transposed = _untransposed(g, a)
    right, right_transposed = _untransposed(g, b)
    return g.op(
        "Gemm",
        left,
        right,
        bias,
        transA=left_transposed or None,
        transB=right_transposed or None,
        alpha=float(alpha) if alpha != 1 else None,
        beta=float(beta) if beta != 1 else None,
    )


@lowers(aten.mm.default)
def mm(g: Graph, out: Any, a: Value, b: Value) -> str:
    return gemm(g, a, b)


@lowers(aten.addmm.default)
def addmm(
    g: Graph,
    out: Any,
    bias: Value,
    a: Value,
    b: Value,
    *,
    beta: Scalar = 1,
    alpha: Scalar = 1,
) -> str:
    return gemm(g, a, b, bias, alpha=alpha, beta=beta)


@lowers(aten.bmm.default)
def bmm(g: Graph, out: Any, a: Value, b: Value) -> str:
    return g.op("MatMul", a, b)


@lowers(aten.baddbmm.default)
def baddbmm(
    g: Graph,
    out: Any,
    bias: Value,
    a: Value,
    b: Value,
    *,
    beta: Scalar = 1,
    alpha: Scalar = 1,
) -> str:
    product = g.op("MatMul", a, b)
    if alpha != 1:
        product = g.op("Mul", product, g.scalar(alpha, out.dtype))
    added = bias.name if beta == 1 else g.op("Mul", bias, g.scalar(beta, out.dtype))
    return g.op("Add", product, added)


@lowers(aten.mv.default)
def mv(g: Graph, out: Any, a: Value, b: Value) -> str:
    # As a column: onnxruntime 1.31 joins a Transpose into a MatMul with a vector and gets it wrong.
    column = Value(g.op("Unsqueeze", b, g.ints([1])), b.dtype, (*b.shape, 1))
    return g.op("Squeeze", gemm(g, a, column), g.ints([1]))


@lowers(aten.dot.default)
def dot(g: Graph, out: Any, a: Value, b: Value) -> str:
    return g.op("MatMul", a, b)
