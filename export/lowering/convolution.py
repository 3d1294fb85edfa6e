"""Convolutions, plain and transposed, each in the form that is fastest for its fixed sizes.

Two forms of the same sums: ONNX's ``Conv`` and ``ConvTranspose``, and columns with one matrix
product over the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from export.lowering.columns import (
    FEW_POSITIONS_FORWARD,
    channels_second,
    columns_of,
    is_thin,
    weight_size,
)
from export.lowering.graph import Graph, Value
from export.lowering.registry import lowers
from export.lowering.window import Window, window_between

aten = torch.ops.aten


@lowers(aten.convolution.default)
def convolution(
    g: Graph,
    out: Any,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> str:
    if transposed:
        w = window_between(out.shape[2:], x.shape[2:], weight, stride, padding, dilation, groups)
        extra = [int(value) for value in output_padding]
        return transposed_convolution(
            g, x, weight, bias, w, extra * w.rank if len(extra) == 1 else extra
        )
    w = window_between(x.shape[2:], out.shape[2:], weight, stride, padding, dilation, groups)
    if not is_thin(w, weight, FEW_POSITIONS_FORWARD):
        return g.op("Conv", x, weight, bias, **w.attributes())
    rows = g.op("Reshape", weight, g.ints([weight_size(weight, 0), -1]))
    product = g.op("Gemm", rows, columns_of(g, x, w))
    if bias is not None:
        product = g.op("Add", product, g.op("Reshape", bias, g.ints([-1, 1])))
    return channels_second(g, product, weight_size(weight, 0), w.positions)


def transposed_convolution(
    g: Graph, x: Value, weight: Value, bias: Value | None, w: Window, extra: Sequence[int]
) -> str:
    """A transposed convolution with ``extra`` positions at each axis's end."""
    attributes = w.attributes()
    if all(value < stride for value, stride in zip(extra, w.stride, strict=True)):
        room = list(extra) if any(extra) else None
        return g.op("ConvTranspose", x, weight, bias, **attributes, output_padding=room)
    # onnxruntime refuses an output padding of a stride or more, which torch allows under a
    # larger dilation: first what the padding had cut off, then zeros that no tap reaches.
    ends = [max(p - value, 0) for p, value in zip(w.padding, extra, strict=True)]
    zeros = [max(value - p, 0) for p, value in zip(w.padding, extra, strict=True)]
    attributes["pads"] = [*w.padding, *ends]
    result = g.op("ConvTranspose", x, weight, **attributes)
    pads = g.ints([0] * (w.rank + 4) + zeros)
    result = g.op("Pad", result, pads, g.scalar(0, x.dtype))
    if bias is None:
        return result
    return g.op("Add", result, g.op("Reshape", bias, g.ints([-1] + [1] * w.rank)))
