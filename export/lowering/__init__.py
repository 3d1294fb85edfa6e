"""From an aten graph to ONNX nodes: a closed table with one small function an operator."""

from export.lowering import (
    comparisons,
    convolution,
    copies,
    creation,
    diagonals,
    elementwise,
    functions,
    indexing,
    linear,
    pooling,
    recurrent,
    reductions,
    shapes,
    unary,
)

__all__ = [
    "comparisons",
    "convolution",
    "copies",
    "creation",
    "diagonals",
    "elementwise",
    "functions",
    "indexing",
    "linear",
    "pooling",
    "recurrent",
    "reductions",
    "shapes",
    "unary",
]
