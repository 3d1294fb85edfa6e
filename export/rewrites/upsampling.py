"""Interpolation as one Resize, or as a product along each axis, whose gradients need no scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from export.insides import disable_current_modes
from export.lowering.graph import Graph, Value
from export.lowering.opaque import opaque
from export.rewrites import RECORDED
from export.rewrites.recurrent import project
from export.short_gradients import ShortGradient

_torchs_own: Callable[..., Tensor] = functional.interpolate
_POOLS = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
_SEPARABLE = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear")


def _of_repeat(x: Tensor, factors: list[int]) -> Tensor:
    sizes = [size * factor for size, factor in zip(x.shape[2:], factors, strict=True)]
    return x.new_empty([*x.shape[:2], *sizes])


def _lower_repeat(g: Graph, out: Any, x: Value, factors: Sequence[int]) -> str:
    return g.op(
        "Resize",
        x,
        None,
        g.constant(np.asarray([1, 1, *factors], dtype=np.float32)),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


@opaque(fake=_of_repeat, lowering=_lower_repeat)
def repeat_nearest(x: Tensor, factors: list[int]) -> Tensor:
    """Each element of the last axes of x [n, c, sizes...] ``factors`` times."""
    for axis, factor in enumerate(factors, start=2):
        x = x.repeat_interleave(factor, axis)
    return x.clone()


class _Repeated(ShortGradient):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: list[int]) -> Tensor:
        ctx.factors = factors
        result: Tensor = repeat_nearest(x, factors)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The sum of each block, as its mean times its elements."""
        count = 1
        for factor in ctx.factors:
            count *= factor
        return _POOLS[len(ctx.factors) - 1](grad, ctx.factors) * count, None


class _Along(ShortGradient):
    """weight [m, s] times each of x [n, s, r]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: Tensor) -> Tensor:
        ctx.save_for_backward(weight, transposed)
        return _product(x, weight, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, transposed = ctx.saved_tensors
        turned: Tensor = _Along.apply(grad, transposed, weight)
        return turned, None, None


def _product(x: Tensor, weight: Tensor, transposed: Tensor) -> Tensor:
    if x.shape[2] == 1:
        return (x.squeeze(2) @ transposed).unsqueeze(2)
    result: Tensor = project(weight, x)
    return result


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """``torch.nn.functional.interpolate``; as torch records it where a size is not fixed."""
    rank = input.dim() - 2
    given = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    sizes = [n for n in input.shape[2:] if isinstance(n, int)]
    if mode not in _SEPARABLE or len(sizes) < rank or not 1 <= rank <= 3 or antialias:
        return _torchs_own(input, *given)
    with disable_current_modes():
        wanted = _torchs_own(torch.zeros(1, 1, *sizes), *given).shape[2:]
    factors = [after // before for before, after in zip(sizes, wanted, strict=True)]
    whole = [f * before for f, before in zip(factors, sizes, strict=True)] == list(wanted)
    if mode.startswith("nearest") and whole and _is_plain(scale_factor, factors, given[4]):
        result: Tensor = _Repeated.apply(input, factors)
        return result
    for axis in range(rank):
        scale = scale_factor[axis] if isinstance(scale_factor, (tuple, list)) else scale_factor
        kept = None if recompute_scale_factor else scale
        weight = _matrix(sizes[axis], wanted[axis], kept, mode, align_corners).to(input.dtype)
        lead, rest = input.shape[: axis + 2], input.shape[axis + 3 :]
        columns = input.reshape(-1, sizes[axis], _count(rest))
        moved: Tensor = _Along.apply(columns, weight, weight.t().contiguous())
        input = moved.reshape(*lead, wanted[axis], *rest)
    return input


def _count(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _is_plain(scale: Any, factors: list[int], recomputed: bool | None) -> bool:
    """Whether each block is a whole one: a scale of 2.1 may give twice the size, but other rows."""
    if scale is None or recomputed:
        return True
    scales = scale if isinstance(scale, (tuple, list)) else [scale] * len(factors)
    return all(s == f for s, f in zip(scales, factors, strict=True))


def _matrix(
    before: int, after: int, scale: float | None, mode: str, align_corners: bool | None
) -> Tensor:
    """[after, before]: what torch makes of each unit vector of an axis."""
    with disable_current_modes():
        units = torch.eye(before)
        # Bicubic exists for pictures alone: those of one row.
        flat = mode == "bicubic"
        size: Any = None if scale is not None else (1, after) if flat else after
        scales: Any = (1.0, scale) if flat and scale is not None else scale
        kind = "linear" if "linear" in mode else mode
        units = units.reshape(before, *([1, 1] if flat else [1]), before)
        rows = _torchs_own(units, size, scales, kind, align_corners)
        return rows.reshape(before, after).t().contiguous()


RECORDED.replaces((functional, "interpolate", interpolate))
