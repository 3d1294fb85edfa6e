"""Pictures read at places that a grid gives, as lookups of the four neighbours of each place.

Jaderberg et al. 2015, equation 5: torch records one operator, of which ONNX has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from export.errors import ExportError


def _middles(size: Any, align_corners: bool) -> Tensor:
    """Places [size] of an axis's elements, in torch's units: -1 to 1 over the axis."""
    number = torch.arange(size).to(torch.get_default_dtype())
    middles: Tensor = number * 2 / (size - 1) if align_corners else (number * 2 + 1) / size
    return middles - 1


def affine_grid(theta: Tensor, size: Sequence[Any], align_corners: bool | None = None) -> Tensor:
    """``torch.nn.functional.affine_grid``: theta [b, 2, 3] to places [b, h, w, 2]."""
    if len(size) != 4:
        raise ExportError(
            "affine_grid of volumes", operator="affine_grid", instead="pictures, [b, c, h, w]"
        )
    height, width = size[2], size[3]
    x = _middles(width, bool(align_corners)).expand(height, width)
    y = _middles(height, bool(align_corners)).unsqueeze(1).expand(height, width)
    base = torch.stack([x, y, torch.ones_like(x)], -1).reshape(height * width, 3).to(theta.dtype)
    return (base @ theta.transpose(1, 2)).reshape(size[0], height, width, 2)


def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """``torch.nn.functional.grid_sample``: input [b, c, h, w] at grid [b, p, q, 2] (x, y)."""
    if (
        input.dim() != 4
        or mode not in ("bilinear", "nearest")
        or padding_mode not in ("zeros", "border")
    ):
        raise ExportError(
            f"grid_sample of {input.dim()} axes, mode {mode!r}, padding {padding_mode!r}",
            operator="grid_sample",
            instead="pictures [b, c, h, w], mode bilinear or nearest, padding zeros or border",
        )
    batch, channels, height, width = input.shape
    flat = input.reshape(batch, channels, height * width)
    x, y = (
        _place(grid[..., axis], size, padding_mode == "border", bool(align_corners))
        for axis, size in ((0, width), (1, height))
    )

    def read(column: Tensor, row: Tensor) -> Tensor:
        inside = (column >= 0) & (column <= width - 1) & (row >= 0) & (row <= height - 1)
        at = _kept(row, height) * width + _kept(column, width)
        index = at.to(torch.int64).reshape(batch, 1, -1).expand(batch, channels, -1)
        found = flat.gather(2, index).reshape(batch, channels, *grid.shape[1:3])
        return torch.where(inside.unsqueeze(1), found, torch.zeros((), dtype=found.dtype))

    if mode == "nearest":
        return read(x.detach().round(), y.detach().round())
    left, top = x.detach().floor(), y.detach().floor()
    right, low = (x - left).unsqueeze(1), (y - top).unsqueeze(1)
    upper = read(left, top) * (1 - right) + read(left + 1, top) * right
    lower = read(left, top + 1) * (1 - right) + read(left + 1, top + 1) * right
    return upper * (1 - low) + lower * low


def _place(at: Tensor, size: Any, border: bool, align_corners: bool) -> Tensor:
    """Element numbers of places between -1 and 1; ``border``: of the nearest ones there are."""
    number = (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2
    return _kept(number, size) if border else number


def _kept(number: Tensor, size: Any) -> Tensor:
    return number.clamp(min=0).clamp(max=size - 1)


EQUALS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.affine_grid: affine_grid,
    torch.nn.functional.grid_sample: grid_sample,
}
