"""From an aten graph to ONNX nodes: a closed table with one small function an operator."""

from export.lowering import (
    convolution,
    creation,
    elementwise,
    indexing,
    linear,
    pooling,
    reductions,
    shapes,
)

__all__ = [
    "convolution",
    "creation",
    "elementwise",
    "indexing",
    "linear",
    "pooling",
    "reductions",
    "shapes",
]
