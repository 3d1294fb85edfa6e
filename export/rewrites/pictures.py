"""Adaptive pooling and interpolation of pictures, without scatters."""

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

_Windows = tuple[Tensor, Tensor]
"""Along one axis of a size: where each window begins, and where it ends."""


def _wanted(output_size: Any, rank: int) -> list[int | None]:
    """The result's last sizes; None stands for the input's."""
    return list(output_size) if isinstance(output_size, Sequence) else [output_size] * rank


def _windows(size: Any, wanted: int) -> _Windows:
    place = torch.arange(wanted)
    begin = torch.div(place * size, wanted, rounding_mode="trunc")
    return begin, torch.div((place + 1) * size + (wanted - 1), wanted, rounding_mode="trunc")


def _inside(size: Any, windows: _Windows) -> Tensor:
    """[windows, size]: which places a window has."""
    begin, end = windows
    place = torch.arange(size)
    return (place >= begin.unsqueeze(1)) & (place < end.unsqueeze(1))


def _mean(x: Tensor, wanted: int) -> Tensor:
    """Means over the windows of the last axis."""
    size = x.shape[-1]
    begin, end = _windows(size, wanted)
    shares = _inside(size, (begin, end)) / (end - begin).unsqueeze(1)
    # Of rows: a product of all axes would ask about strides, which sizes decide.
    rows = x.contiguous().flatten(0, -2)
    return (rows @ shares.to(x.dtype).t()).reshape([*x.shape[:-1], wanted])


def _largest(x: Tensor, wanted: int | None) -> tuple[Tensor, Tensor]:
    """Maxima over the windows of the last axis, and the first place of each."""
    size = x.shape[-1]
    if wanted is None:
        return x, torch.arange(size).expand(x.shape)
    begin, end = _windows(size, wanted)
    seen = torch.where(_inside(size, (begin, end)), x.detach().unsqueeze(-2), -torch.inf)
    # Of -inf alone, the first place inside.
    place = torch.maximum(seen.argmax(-1), begin)
    return x.gather(-1, place), place


def _is_free(x: Tensor, rank: int) -> bool:
    return any(isinstance(size, torch.SymInt) for size in x.shape[-rank:])


def _average(torchs: Callable[..., Tensor], rank: int) -> Callable[..., Tensor]:
    def adaptive_avg_pool(input: Tensor, output_size: Any) -> Tensor:
        """torch's; ``input`` [..., c, sizes], result [..., c, ``output_size``]."""
        wanted = _wanted(output_size, rank)
        if not _is_free(input, rank) or set(wanted) == {1}:
            # torch would set a mean's strides over all places, where the channels come last.
            return torchs(input.contiguous(), output_size)
        for axis, want in zip(range(-rank, 0), wanted, strict=True):
            if want is not None:
                input = _mean(input.transpose(axis, -1), want).transpose(axis, -1)
        return input

    return adaptive_avg_pool


def _maximum(torchs: Callable[..., Any], rank: int, indices: bool) -> Callable[..., Any]:
    def adaptive_max_pool(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        """torch's, the first of equal ones; ``input`` [..., c, sizes]."""
        if not _is_free(input, rank):
            return torchs(input, output_size, return_indices)
        wanted = _wanted(output_size, rank)
        # The last axis first: of equal ones in several rows the first row's.
        largest, flat, times = input, None, 1
        for axis in range(-1, -rank - 1, -1):
            largest, place = _largest(largest.transpose(axis, -1), wanted[axis])
            largest, place = largest.transpose(axis, -1), place.transpose(axis, -1)
            flat = place if flat is None else flat.gather(axis, place) + place * times
            times = times * input.shape[axis]
        return (largest, flat) if indices or return_indices else largest

    return adaptive_max_pool


def _maxima(rank: int) -> dict[Any, Callable[..., Any]]:
    alone = getattr(functional, f"adaptive_max_pool{rank}d")
    both = getattr(functional, f"adaptive_max_pool{rank}d_with_indices")
    return {alone: _maximum(alone, rank, False), both: _maximum(both, rank, True)}


RECORDED.equals(
    {
        functional.adaptive_avg_pool1d: _average(functional.adaptive_avg_pool1d, 1),
        functional.adaptive_avg_pool2d: _average(functional.adaptive_avg_pool2d, 2),
        functional.adaptive_avg_pool3d: _average(functional.adaptive_avg_pool3d, 3),
        **_maxima(1),
        **_maxima(2),
        **_maxima(3),
    }
)


# Interpolation as one Resize, or as a product along each axis, whose gradients need no scatter.

_torchs_own: Callable[..., Tensor] = functional.interpolate
_POOLS = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
_SEPARABLE = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear")


def _of_repeat(x: Tensor, factors: list[int]) -> Tensor:
    sizes = [size * factor for size, factor in zip(x.shape[2:], factors, strict=True)]
    return x.new_empty([*x.shape[:2], *sizes])


def _lower_repeat(g: Graph, x: Value, factors: Sequence[int]) -> str:
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
