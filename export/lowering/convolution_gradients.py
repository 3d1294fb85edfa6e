"""The gradients of convolutions, each in the form that is fastest for its fixed sizes.

Three forms of the same sums: ONNX's ``Conv`` and ``ConvTranspose``; columns with one matrix product
over the whole batch; and, for the weight's gradient, a convolution in which batch and channels
change places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from export.lowering.columns import (
    FEW_POSITIONS_BACKWARD,
    FEW_POSITIONS_FORWARD,
    channels_first,
    channels_second,
    columns_of,
    is_thin,
    joined,
    taps_of,
    weight_size,
)
from export.lowering.convolution import transposed_convolution
from export.lowering.graph import Dim, Graph, Value, fixed
from export.lowering.registry import lowers
from export.lowering.window import Window, window_between

aten = torch.ops.aten

# From this many channels columns whose innermost axis is the channels beat the exchanged
# convolution for the weight's gradient, by 1.7 to 2.6 times.
_MANY_CHANNELS = 16


@lowers(aten.convolution_backward.default)
def convolution_backward(
    g: Graph,
    out: Any,
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Sequence[Dim] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[str | None, ...]:
    # A transposed convolution is the input gradient of a plain one, so its own gradients are
    # the plain one's with input and output exchanged.
    large, small = (grad, x) if transposed else (x, grad)
    w = window_between(large.shape[2:], small.shape[2:], weight, stride, padding, dilation, groups)
    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        grad_x = (
            _transposed_input(g, grad, weight, x, w) if transposed else _input(g, grad, weight, w)
        )
    if wanted[1]:
        grad_weight = _weight(g, large, small, weight, w)
    if wanted[2]:
        axes = g.ints([0, *range(2, grad.rank)])
        grad_bias = g.op("ReduceSum", grad, axes, keepdims=0)
    return grad_x, grad_weight, grad_bias


def _transposed_input(g: Graph, grad: Value, weight: Value, x: Value, w: Window) -> str:
    result = g.op("Conv", grad, weight, **w.attributes())
    crops = [
        fixed(size - d * (k - 1) - 1 + 2 * p) for size, k, d, p in zip(
            w.sizes, w.kernel, w.dilation, w.padding, strict=True)
    ]  # fmt: skip
    have = [None if c is None else c // s + 1 for c, s in zip(crops, w.stride, strict=True)]
    if have == [fixed(size) for size in x.shape[2:]] and None not in have:
        return result
    # An output padding of a stride or more makes room for positions beyond the input's.
    axes = g.ints(range(2, x.rank))
    return g.op("Slice", result, g.ints([0] * w.rank), g.shape(x.shape[2:]), axes)


def _input(g: Graph, grad: Value, weight: Value, w: Window) -> str:
    """The gradient of the input [n, c, sizes]."""
    if w.rank <= 2 and is_thin(w, weight, FEW_POSITIONS_BACKWARD):
        return _input_by_one_product(g, grad, weight, w)
    left_over = [
        fixed(size + 2 * p - d * (k - 1) - 1 - (y - 1) * s)
        for size, y, k, s, p, d in zip(
            w.sizes, w.positions, w.kernel, w.stride, w.padding, w.dilation, strict=True
        )
    ]
    if None not in left_over:
        extra = [value for value in left_over if value is not None]
        return transposed_convolution(g, grad, weight, None, w, extra)
    # Sizes along a named axis: the whole reach of the kernel, then cut or filled to the input's.
    attributes = {**w.attributes(), "pads": [0] * (2 * w.rank)}
    full = g.op("ConvTranspose", grad, weight, **attributes)
    ends = [
        size + p - ((y - 1) * s + d * (k - 1) + 1)
        for size, y, k, s, p, d in zip(
            w.sizes, w.positions, w.kernel, w.stride, w.padding, w.dilation, strict=True
        )
    ]
    pads = g.shape([0, 0, *(-p for p in w.padding), 0, 0, *ends])
    return g.op("Pad", full, pads, g.scalar(0, grad.dtype))


def _input_by_one_product(g: Graph, grad: Value, weight: Value, w: Window) -> str:
    """weight^T [c * taps, o] @ grad [o, n * positions], then each tap's share to its place."""
    outputs, channels = weight_size(weight, 0), weight_size(weight, 1)
    rows = g.op("Reshape", weight, g.ints([outputs, -1]))
    columns = g.op("Reshape", channels_first(g, grad, w.rank), g.ints([outputs, -1]))
    product = g.op("Gemm", rows, columns, transA=1)
    positions = w.fixed_positions()
    assert positions is not None, "is_thin checked it"
    if w.taps == 1 and set(w.stride) == {1} and not any(w.padding):
        return channels_second(g, product, channels, w.positions)
    count = math.prod(positions)
    images = g.op("Reshape", product, g.ints([channels * w.taps, -1, count]))
    # onnxruntime's Col2Im is wrong along a single axis that is dilated, so that one gets a second.
    lead = 2 - w.rank
    result = g.op(
        "Col2Im",
        g.op("Transpose", images, perm=[1, 0, 2]),
        g.shape([1] * lead + list(w.sizes)),
        g.ints([1] * lead + list(w.kernel)),
        strides=[1] * lead + list(w.stride),
        pads=([0] * lead + list(w.padding)) * 2,
        dilations=[1] * lead + list(w.dilation),
    )
    return g.op("Squeeze", result, g.ints([2])) if lead else result


def _weight(g: Graph, x: Value, grad: Value, weight: Value, w: Window) -> str:
    """The gradient of the weight [o, c / groups, kernel] for input x and output gradient grad."""
    channels, outputs = fixed(x.shape[1]), fixed(grad.shape[1])
    if w.groups == 1 and channels is not None and outputs is not None:
        if is_thin(w, weight, FEW_POSITIONS_FORWARD):
            rows = g.op("Reshape", channels_first(g, grad, w.rank), g.ints([outputs, -1]))
            product = g.op("Gemm", rows, columns_of(g, x, w), transB=1)
            return g.op("Reshape", product, g.shape(weight.shape))
        if channels >= _MANY_CHANNELS and w.fixed_positions() is not None:
            return _weight_by_one_product(g, x, grad, weight, w)
    return _weight_by_exchange(g, x, grad, weight, w)


def _weight_by_one_product(g: Graph, x: Value, grad: Value, weight: Value, w: Window) -> str:
    """grad [o, n * positions] @ columns [n * positions, taps * c]: channels stay contiguous."""
    outputs, channels = weight_size(weight, 0), weight_size(weight, 1)
    rows = g.op("Reshape", channels_first(g, grad, w.rank), g.ints([outputs, -1]))
    last = g.op("Transpose", x, perm=[0, *range(2, w.rank + 2), 1])
    columns = joined(g, taps_of(g, last, w, 1, x.dtype), w.rank + 1)
    flat = g.op("Reshape", columns, g.ints([-1, w.taps * channels]))
    product = g.op("Gemm", rows, flat)
    if w.taps == 1:
        return g.op("Reshape", product, g.shape(weight.shape))
    split = g.op("Reshape", product, g.ints([outputs, w.taps, channels]))
    return g.op("Reshape", g.op("Transpose", split, perm=[0, 2, 1]), g.shape(weight.shape))


def _weight_by_exchange(g: Graph, x: Value, grad: Value, weight: Value, w: Window) -> str:
    """One convolution with batch and channels exchanged, and stride and dilation too.

    x [n, groups * c, ...] becomes [c, groups * n, ...], the gradient [groups * o, n, ...] is
    the kernel; the result [c, groups * o, kernel] may have room beyond the kernel, cut off.
    """
    channels = weight.shape[1]
    if w.groups == 1:
        exchanged = channels_first(g, x, w.rank)
    else:
        batch = x.shape[0]
        spatial = x.shape[2:]
        split = g.op("Reshape", x, g.target([batch, w.groups, channels, *spatial]))
        moved = g.op("Transpose", split, perm=[2, 1, 0, *range(3, x.rank + 1)])
        exchanged = g.op("Reshape", moved, g.target([channels, batch * w.groups, *spatial]))
    result = g.op(
        "Conv",
        exchanged,
        channels_first(g, grad, w.rank),
        strides=list(w.dilation),
        pads=[*w.padding, *w.padding],
        dilations=list(w.stride),
        group=w.groups,
    )
    room = [
        fixed(size + 2 * p - s * (y - 1) - 1)
        for size, y, s, p in zip(w.sizes, w.positions, w.stride, w.padding, strict=True)
    ]
    have = [None if r is None else r // d + 1 for r, d in zip(room, w.dilation, strict=True)]
    if have != list(w.kernel):
        axes = g.ints(range(2, w.rank + 2))
        result = g.op("Slice", result, g.ints([0] * w.rank), g.ints(w.kernel), axes)
    return channels_first(g, result, w.rank)
