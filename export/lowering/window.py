"""How a convolution's kernel slides over its input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from export.errors import ExportError
from export.lowering.graph import Dim, Value, fixed


@dataclass(frozen=True)
class Window:
    """How a kernel slides over ``sizes`` input positions to give ``positions`` output positions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    sizes: tuple[Dim, ...]
    positions: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    @property
    def taps(self) -> int:
        """Number of weights for a pair of channels."""
        return math.prod(self.kernel)

    def attributes(self) -> dict[str, Any]:
        """As ``Conv`` and ``ConvTranspose`` want them."""
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.stride),
            "pads": [*self.padding, *self.padding],
            "dilations": list(self.dilation),
            "group": self.groups,
        }

    def fixed_positions(self) -> list[int] | None:
        """The output positions along each axis, or None where one depends on a named axis."""
        sizes = [fixed(size) for size in (*self.positions, *self.sizes)]
        if any(size is None for size in sizes):
            return None
        return [int(size) for size in sizes[: self.rank] if size is not None]


def window_between(
    x_sizes: Sequence[Dim],
    y_sizes: Sequence[Dim],
    weight: Value,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Window:
    """The window that leads from ``x_sizes`` (the larger side) to ``y_sizes``."""
    kernel = [fixed(size) for size in weight.shape[2:]]
    if any(size is None for size in kernel):
        raise ExportError(
            "a kernel whose size depends on a named axis",
            operator="aten.convolution",
            instead="a weight whose named axes are channels",
        )
    rank = len(kernel)

    def each(values: Sequence[int]) -> tuple[int, ...]:
        listed = [int(value) for value in values]
        return tuple(listed * rank if len(listed) == 1 else listed)

    return Window(
        tuple(int(size) for size in kernel if size is not None),
        each(stride),
        each(padding),
        each(dilation),
        groups,
        tuple(x_sizes),
        tuple(y_sizes),
    )
