"""Pictures and volumes read at places that a grid names, as gathers: torch has its own gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from export.errors import ExportError
from export.rewrites import RECORDED

_Tap = tuple[Tensor, Tensor]
"""A whole place, and the weight of what is there."""


def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """``torch.nn.functional.grid_sample``.

    input [n, c, h, w], grid [n, ho, wo, 2] with x and y from -1 to 1, result [n, c, ho, wo]; or
    volumes [n, c, d, h, w] by grids [n, do, ho, wo, 3].
    """
    if mode == "bicubic" and input.dim() != 4:
        raise ExportError(
            "sampling of volumes by cubic splines, which torch has not",
            operator="grid_sample",
            instead="mode 'bilinear' or 'nearest'",
        )
    sizes, corners = input.shape[2:], bool(align_corners)
    # The grid begins with x, the input ends with it.
    numbers = grid.unbind(-1)[::-1]
    places = [_place(x, size, corners) for x, size in zip(numbers, sizes, strict=True)]
    if mode != "bicubic":
        places = _bounded(places, sizes, padding_mode, corners)
    if mode == "nearest":
        # The grid's gradient is zero in torch, not none: decay acts on what it is made of.
        nothing = torch.where(torch.zeros((), dtype=torch.bool), sum(places), 0.0)
        return _read(input, [torch.round(place) for place in places]) + nothing.unsqueeze(1)
    # All taps at once: [n, taps of an axis, ..., places], axis after axis.
    rank, ways = len(places), _cubic if mode == "bicubic" else _linear
    along = [_stacked(ways(place), axis, rank) for axis, place in enumerate(places)]
    whole = [at for at, _ in along]
    if mode == "bicubic":
        whole = _bounded(whole, sizes, padding_mode, corners)
    weight: Any = math.prod(weights for _, weights in along)
    result: Tensor = (_read(input, whole) * weight.unsqueeze(1)).sum(list(range(2, 2 + rank)))
    return result


def _stacked(taps: Sequence[_Tap], axis: int, rank: int) -> _Tap:
    """Taps along one of the axes behind the first, of size 1 where other axes' taps are."""
    at, weights = (torch.stack(each, 1) for each in zip(*taps, strict=True))
    shape = [at.shape[0], *[1] * axis, len(taps), *[1] * (rank - 1 - axis), *at.shape[2:]]
    return at.reshape(shape), weights.reshape(shape)


def _place(x: Tensor, size: Any, align_corners: bool) -> Tensor:
    """Numbers from -1 to 1 as places of elements."""
    found: Tensor = (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2
    return found


def _bounded(
    places: Sequence[Tensor], sizes: Sequence[Any], padding_mode: str, align_corners: bool
) -> list[Tensor]:
    """Places none of which is outside, where there is a border or reflection."""
    if padding_mode == "zeros":
        return list(places)
    if padding_mode == "reflection":
        pairs = zip(places, sizes, strict=True)
        places = [_reflected(x, size, align_corners) for x, size in pairs]
    # No gradient on the border itself, as in torch.
    return [
        torch.where(
            (x > 0) & (x < size - 1),
            x,
            x.detach().clamp(min=0).minimum(x.new_ones(()) * (size - 1)),
        )
        for x, size in zip(places, sizes, strict=True)
    ]


def _reflected(x: Tensor, size: Any, align_corners: bool) -> Tensor:
    """Places folded back at the outermost elements, or at their outer edges."""
    low, span = (0.0, torch.sym_max(size - 1, 1)) if align_corners else (-0.5, size)
    x = x - low
    x = torch.where(x < 0, -x, x)
    times = torch.floor(x.detach() / span)
    rest = x - times * span
    return torch.where(times - 2 * torch.floor(times / 2) == 0, rest, span - rest) + low


def _linear(x: Tensor) -> list[_Tap]:
    first = torch.floor(x.detach())
    return [(first, first + 1 - x), (first + 1, x - first)]


def _cubic(x: Tensor) -> list[_Tap]:
    """Keys 1981, equation 4, with a = -0.75 as torch has it."""
    first, a = torch.floor(x.detach()), -0.75
    t = x - first

    def near(s: Tensor) -> Tensor:
        return ((a + 2) * s - (a + 3)) * s * s + 1

    def far(s: Tensor) -> Tensor:
        return ((a * s - 5 * a) * s + 8 * a) * s - 4 * a

    weights = (far(t + 1), near(t), near(1 - t), far(2 - t))
    return [(first + i, weight) for i, weight in enumerate(weights, -1)]


def _read(input: Tensor, places: Sequence[Tensor]) -> Tensor:
    """The elements at whole places [n, ...], which broadcast, zero outside: [n, c, ...]."""
    n, channels, *sizes = input.shape
    inside, flat = None, None
    for x, size in zip(places, sizes, strict=True):
        x = x.detach()
        within = (x >= 0) & (x <= size - 1)
        at = torch.where(within, x, 0.0).to(torch.int64)
        inside = within if inside is None else inside & within
        flat = at if flat is None else flat * size + at
    assert flat is not None and inside is not None
    found = input.reshape(n, channels, -1).gather(2, flat.reshape(n, 1, -1).expand(n, channels, -1))
    return torch.where(inside.unsqueeze(1), found.reshape([n, channels, *flat.shape[1:]]), 0.0)


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """``torch.nn.functional.affine_grid``.

    theta [n, 2, 3] for pictures [n, c, h, w], [n, 3, 4] for volumes [n, c, d, h, w].
    """
    rank = len(size) - 2
    grid = theta[..., rank].reshape(-1, *[1] * rank, rank)
    for axis, length in enumerate(size[2:]):
        line = _line(length, bool(align_corners)).to(theta.dtype)
        column = theta[..., rank - 1 - axis].reshape(-1, *[1] * rank, rank)
        grid = grid + line.reshape([-1] + [1] * (rank - axis)) * column
    return grid


def _line(n: int, align_corners: bool) -> Tensor:
    """The places of n elements from -1 to 1; with corners the first and last are these."""
    place = torch.arange(n).to(torch.float32)
    if not align_corners:
        return (2 * place + 1) / n - 1
    if n > 1:
        place = 2 * place / (n - 1) - 1
    return place


RECORDED.equals({functional.grid_sample: grid_sample, functional.affine_grid: affine_grid})
