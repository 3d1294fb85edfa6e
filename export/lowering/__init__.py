"""From an aten graph to ONNX nodes: a closed table with one small function an operator."""

from export.lowering import convolution, elementwise, indexing, pooling, reductions, shapes

__all__ = ["convolution", "elementwise", "indexing", "pooling", "reductions", "shapes"]
