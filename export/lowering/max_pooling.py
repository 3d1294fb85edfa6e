"""Maximum pooling and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from export.errors import ExportError
from export.lowering.graph import Dim, Graph, Value
from export.lowering.pooling_windows import along_axes, even_window, fixed_sizes, with_batch
from export.lowering.registry import lowers

aten = torch.ops.aten


def _max_pool(
    g: Graph,
    out: Any,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[str, str]:
    rank = x.rank - 1 if x.rank < 4 else x.rank - 2
    rank = len(kernel) if len(kernel) > 1 else rank
    sizes = x.shape[-rank:]
    window = along_axes(kernel, rank)
    steps = along_axes(stride, rank, window)
    begins, spread = along_axes(padding, rank), along_axes(dilation, rank)
    ends = begins
    if ceil_mode:
        # Explicit padding at the end: runtimes differ in which windows ceil_mode keeps.
        inner = fixed_sizes(sizes, "aten.max_pool2d")
        positions = fixed_sizes(out[0].shape[-rank:], "aten.max_pool2d")
        ends = [
            max(0, (y - 1) * s + d * (k - 1) + 1 - size - p)
            for y, s, d, k, size, p in zip(
                positions, steps, spread, window, inner, begins, strict=True
            )
        ]
    batched = with_batch(g, x, rank)
    values, flat = g.multi(
        "MaxPool",
        batched,
        outputs=2,
        kernel_shape=window,
        strides=steps,
        pads=[*begins, *ends],
        dilations=spread if set(spread) != {1} else None,
    )
    # ONNX counts indices through the whole tensor, torch within an image's channel.
    plane: Dim = 1
    for size in sizes:
        plane = plane * size
    indices = g.op("Mod", flat, g.scalar(plane, torch.int64))
    return g.reshape(values, out[0].shape) if x is not batched else values, (
        g.reshape(indices, out[1].shape) if x is not batched else indices
    )


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(
    g: Graph,
    out: Any,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[str, str]:
    return _max_pool(g, out, x, kernel, stride, padding, dilation, ceil_mode)


def _flat_indices(g: Graph, indices: Value, operator: str) -> str:
    """MaxPool's own indices, through the whole tensor, behind torch's."""
    node = g.producer.get(indices.name)
    while node is not None and node.op_type in ("Reshape", "Unsqueeze", "Squeeze"):
        node = g.producer.get(node.input[0])
    if node is None or node.op_type != "Mod" or g.producer[node.input[0]].op_type != "MaxPool":
        raise ExportError(
            "the indices of a maximum were changed before its gradient",
            operator=operator,
            instead="the pooling's result alone",
        )
    return str(node.input[0])


def _max_pool_gradient(g: Graph, grad: Value, x: Value, indices: Value, apart: bool) -> str:
    """``grad`` added at the places that ``indices`` name, in the shape of ``x``.

    Ties went to one place in the forward pass, and only that place gets the gradient. ``apart``
    says that no two windows overlap, so that no place is named twice.
    """
    flat = _flat_indices(g, indices, "aten.max_pool2d_with_indices_backward")
    if apart and x.rank >= 4:
        places = flat if x.rank == len(indices.shape) else g.reshape(flat, indices.shape)
        # The kernel only serves to guess the output's shape, which is given.
        ones = [1] * (x.rank - 2)
        return g.op("MaxUnpool", grad, places, g.shape(x.shape), kernel_shape=ones, strides=ones)
    elements: Dim = 1
    for size in x.shape:
        elements = elements * size
    added = g.op(
        "ScatterElements",
        g.zeros([elements], x.dtype),
        g.op("Reshape", flat, g.ints([-1])),
        g.op("Reshape", grad, g.ints([-1])),
        axis=0,
        reduction=None if apart else "add",
    )
    return g.op("Reshape", added, g.target(x.shape))


@lowers(
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default
)
def max_pool_backward(
    g: Graph,
    out: Any,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Value,
) -> str:
    rank = max(len(kernel), 2)
    window, spread = along_axes(kernel, rank), along_axes(dilation, rank)
    steps = along_axes(stride, rank, window)
    apart = all(s >= d * (k - 1) + 1 for s, d, k in zip(steps, spread, window, strict=True))
    return _max_pool_gradient(g, grad, x, indices, apart)


@lowers(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(g: Graph, out: Any, x: Value, sizes: Sequence[int]) -> tuple[str, str]:
    window = even_window(x, out[0], 2)
    if window is None:
        raise ExportError(
            f"adaptive max pooling of {list(x.shape[-2:])} to {list(sizes)}, which does not divide",
            operator="aten.adaptive_max_pool2d",
            instead="torch.nn.MaxPool2d, or an output size that divides the input's",
        )
    return _max_pool(g, out, x, window, window, (0, 0), (1, 1), False)


@lowers(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(g: Graph, out: Any, grad: Value, x: Value, indices: Value) -> str:
    return _max_pool_gradient(g, grad, x, indices, True)
