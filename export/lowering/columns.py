"""Columns: what each tap of a kernel sees, laid out for one matrix product over the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from export.lowering.graph import Dim, Graph, Tensorish, Value, fixed
from export.lowering.window import Window

# onnxruntime multiplies image by image. With few positions an image's product is so thin that
# the time goes into reading the weights again for each image; one product over the batch reads
# them once. Measured on x86 with AVX2: 3 to 4 times faster at 2 x 2 positions and 512 channels.
FEW_POSITIONS_FORWARD = 9
FEW_POSITIONS_BACKWARD = 16
_MANY_WEIGHTS = 65536


def is_thin(w: Window, weight: Value, limit: int) -> bool:
    """Whether one product over the batch beats a product an image: few positions, many weights."""
    positions = w.fixed_positions()
    sizes = [fixed(size) for size in weight.shape]
    if w.groups != 1 or positions is None or any(size is None for size in sizes):
        return False
    return math.prod(positions) <= limit and (
        math.prod(int(size) for size in sizes if size is not None) >= _MANY_WEIGHTS
    )


def weight_size(value: Value, axis: int) -> int:
    """A size that is known to be fixed."""
    number = fixed(value.shape[axis])
    assert number is not None, "callers check that the weight's sizes are fixed"
    return number


def channels_first(g: Graph, value: Tensorish, rank: int) -> str:
    """[n, c, ...] to [c, n, ...] and back."""
    return g.op("Transpose", value, perm=[1, 0, *range(2, rank + 2)])


def channels_second(g: Graph, product: str, channels: int, positions: Sequence[Dim]) -> str:
    """A product's [c, n * positions] as [n, c, positions]."""
    spatial = g.op("Reshape", product, g.target([channels, -1, *positions]))
    return channels_first(g, spatial, len(positions))


def taps_of(g: Graph, x: Tensorish, w: Window, first_axis: int, dtype: torch.dtype) -> list[str]:
    """The input as each tap of the kernel sees it, positions from ``first_axis`` on."""
    axes = g.ints(range(first_axis, first_axis + w.rank))
    if any(w.padding):
        around = [0] * (w.rank + 2)
        around[first_axis : first_axis + w.rank] = w.padding
        x = g.op("Pad", x, g.ints(around * 2), g.scalar(0, dtype))
    positions = w.fixed_positions()
    assert positions is not None, "callers check that the sizes are fixed"
    if w.taps == 1 and set(w.stride) == {1}:
        return [x if isinstance(x, str) else x.name]
    parts = []
    for tap in range(w.taps):
        begins: list[int] = []
        ends: list[int] = []
        for axis in reversed(range(w.rank)):
            tap, index = divmod(tap, w.kernel[axis])
            begin = index * w.dilation[axis]
            begins.insert(0, begin)
            ends.insert(0, begin + (positions[axis] - 1) * w.stride[axis] + 1)
        parts.append(g.op("Slice", x, g.ints(begins), g.ints(ends), axes, g.ints(w.stride)))
    return parts


def joined(g: Graph, parts: list[str], axis: int) -> str:
    """One value of the parts, one after another along the axis."""
    return parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=axis)


def columns_of(g: Graph, x: Value, w: Window) -> str:
    """[c * taps, n * positions], rows in the order of the weight's."""
    parts = taps_of(g, channels_first(g, x, w.rank), w, 2, x.dtype)
    return g.op("Reshape", joined(g, parts, 1), g.ints([weight_size(x, 1) * w.taps, -1]))
