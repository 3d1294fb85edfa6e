"""Symbolic sizes as nodes that compute them at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import sympy
from onnx import TensorProto
from torch.utils._sympy import functions as torch_sympy

from export.errors import ExportError

if TYPE_CHECKING:
    from export.lowering.graph import Graph

_ARITHMETIC: tuple[tuple[Any, str], ...] = (
    (sympy.Add, "Add"),
    (sympy.Mul, "Mul"),
    (torch_sympy.FloorDiv, "Div"),
    (torch_sympy.CleanDiv, "Div"),
    (torch_sympy.PythonMod, "Mod"),
    (torch_sympy.Mod, "Mod"),
    (sympy.Max, "Max"),
    (torch_sympy.Max, "Max"),
    (sympy.Min, "Min"),
    (torch_sympy.Min, "Min"),
)


_REAL_ARITHMETIC: tuple[tuple[Any, str], ...] = (
    (sympy.Add, "Add"),
    (sympy.Mul, "Mul"),
    (sympy.Pow, "Pow"),
    (torch_sympy.IntTrueDiv, "Div"),
    (torch_sympy.FloatTrueDiv, "Div"),
    (torch_sympy.FloatPow, "Pow"),
)


def _is_whole(expr: sympy.Expr) -> bool:
    whole = tuple(kind for kind, _ in _ARITHMETIC)
    return isinstance(expr, whole) and all(
        part.is_Integer or isinstance(part, sympy.Symbol) or _is_whole(part) for part in expr.args
    )


def whole(graph: Graph, expr: sympy.Expr) -> str:
    """A size as an int64 tensor of shape [1].

    Raises ExportError where it depends on data or has no exact integer form.
    """
    if isinstance(expr, sympy.Symbol):
        where = graph.place_of(expr)
        if where is None:
            raise ExportError(
                f"a size ({expr}) depends on data, not on a named axis",
                instead="fixed sizes, or a mask instead of a selection",
            )
        return graph.op("Shape", where[0], start=where[1], end=where[1] + 1)
    parts = [graph.size(part) for part in expr.args]
    for kind, op_type in _ARITHMETIC:
        if isinstance(expr, kind):
            result = parts[0]
            for part in parts[1:]:
                result = graph.op(op_type, result, part)
            return result
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and int(expr.exp) > 0:
        result = parts[0]
        for _ in range(int(expr.exp) - 1):
            result = graph.op("Mul", result, parts[0])
        return result
    raise ExportError(
        f"a size is computed as {expr}, which has no exact integer form in the graph",
        instead="sizes that are sums, products or whole quotients of the named axes",
    )


def fraction(graph: Graph, expr: sympy.Expr) -> str:
    """A size expression with real quotients, as a float64 tensor of shape [1]."""
    if expr.is_number:
        return graph.constant(np.asarray([float(expr)], dtype=np.float64))
    if isinstance(expr, sympy.Symbol) or _is_whole(expr):
        return graph.op("Cast", graph.size(expr), to=TensorProto.DOUBLE)
    parts = [fraction(graph, part) for part in expr.args]
    for kind, op_type in _REAL_ARITHMETIC:
        if isinstance(expr, kind):
            result = parts[0]
            for part in parts[1:]:
                result = graph.op(op_type, result, part)
            return result
    if isinstance(expr, torch_sympy.ToFloat):
        return parts[0]
    if type(expr).__name__ == "OpaqueUnaryFn_sqrt":
        return graph.op("Sqrt", parts[0])
    raise ExportError(
        f"a number is computed from sizes as {expr}, which has no form in the graph",
        instead="sums, products, quotients, powers and roots of the named axes",
    )
