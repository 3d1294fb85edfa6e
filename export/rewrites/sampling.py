"""Pictures read at places that a grid names, as a gather: torch's own gradient has no form here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from export.errors import ExportError


def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """``torch.nn.functional.grid_sample``, bilinear or nearest, outside zeros or the border.

    input [n, c, h, w], grid [n, ho, wo, 2] with x and y from -1 to 1; result [n, c, ho, wo].
    """
    if input.dim() != 4 or mode not in ("bilinear", "nearest") or padding_mode == "reflection":
        raise ExportError(
            "sampling of volumes, by cubic splines, or with reflection",
            operator="grid_sample",
            instead="pictures [n, c, h, w], mode 'bilinear' or 'nearest', padding_mode 'zeros' or "
            "'border'",
        )
    border = padding_mode == "border"
    height, width = input.shape[2:]
    x = _place(grid[..., 0], width, border, bool(align_corners))
    y = _place(grid[..., 1], height, border, bool(align_corners))
    if mode == "nearest":
        # The grid's gradient is zero in torch, not none: decay acts on what it is made of.
        nothing = torch.where(torch.zeros((), dtype=torch.bool), x + y, 0.0)
        return _read(input, torch.round(x), torch.round(y)) + nothing.unsqueeze(1)
    left, top = torch.floor(x), torch.floor(y)
    total: Any = 0
    for down in (0, 1):
        for right in (0, 1):
            across = x - left if right else left + 1 - x
            along = y - top if down else top + 1 - y
            corner = _read(input, left + right, top + down)
            total = total + corner * (across * along).unsqueeze(1)
    result: Tensor = total
    return result


def _place(x: Tensor, size: Any, border: bool, align_corners: bool) -> Tensor:
    """Numbers from -1 to 1 as places of elements; with a border none is outside."""
    x = (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2
    if not border:
        return x
    # No gradient on the border itself, as in torch.
    inside = (x > 0) & (x < size - 1)
    return torch.where(inside, x, x.detach().clamp(min=0).minimum(x.new_ones(()) * (size - 1)))


def _read(input: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The elements at whole places, zero outside: [n, c, ho, wo]."""
    n, channels, height, width = input.shape
    x, y = x.detach(), y.detach()
    inside = (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
    place = torch.where(inside, y * width + x, 0.0).to(torch.int64)
    flat = place.reshape(n, 1, -1).expand(n, channels, -1)
    found = input.reshape(n, channels, -1).gather(2, flat)
    shape = [n, channels, *x.shape[1:]]
    return torch.where(inside.unsqueeze(1), found.reshape(shape), 0.0)


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """``torch.nn.functional.affine_grid`` of theta [n, 2, 3] for pictures [n, c, h, w]."""
    if len(size) != 4:
        raise ExportError(
            "a grid over volumes", operator="affine_grid", instead="pictures [n, c, h, w]"
        )
    _, _, height, width = size
    x, y = (_line(n, bool(align_corners)).to(theta.dtype) for n in (width, height))
    grid = x.unsqueeze(1) * theta[:, None, None, :, 0] + theta[:, None, None, :, 2]
    result: Tensor = grid + y.reshape(-1, 1, 1) * theta[:, None, None, :, 1]
    return result


def _line(n: int, align_corners: bool) -> Tensor:
    """The places of n elements from -1 to 1; with corners the first and last are these."""
    place = torch.arange(n).to(torch.float32)
    if not align_corners:
        return (2 * place + 1) / n - 1
    if n > 1:
        place = 2 * place / (n - 1) - 1
    return place


EQUALS: dict[Any, Any] = {
    functional.grid_sample: grid_sample,
    functional.affine_grid: affine_grid,
}
