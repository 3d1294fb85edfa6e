"""From an aten graph to ONNX nodes: a closed table with one small function an operator."""

from export.lowering import (
    creation,
    elementwise,
    indexing,
    linear,
    recurrent,
    reductions,
    shapes,
)

__all__ = ["creation", "elementwise", "indexing", "linear", "recurrent", "reductions", "shapes"]
