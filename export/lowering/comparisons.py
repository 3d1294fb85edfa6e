"""Comparisons, logic and bits."""

from __future__ import annotations

from typing import Any, cast

import torch

from export.lowering.elementwise import Operand, operands
from export.lowering.graph import Graph, Number, Value
from export.lowering.registry import lowers

aten = torch.ops.aten


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
def logical_not(g: Graph, out: Any, a: Value) -> str:
    return g.op("Not", g.cast(a, torch.bool))


@lowers(aten.bitwise_not.default)
def bitwise_not(g: Graph, out: Any, a: Value) -> str:
    return g.op("Not" if a.dtype == torch.bool else "BitwiseNot", a)
