"""Running products, with a gradient that is right beside zeros and at any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from export.rewrites import RECORDED
from export.short_gradients import ShortGradient


def _running(x: Tensor) -> Tensor:
    """Products along the last axis, up to each place: by doubling, or by a square of factors."""
    n = x.shape[-1]
    if isinstance(n, int):
        reach = 1
        while reach < n:
            x = x * torch.nn.functional.pad(x[..., : n - reach], [reach, 0], value=1.0)
            reach *= 2
        return x
    place = torch.arange(n)
    return torch.where(place.unsqueeze(1) >= place, x.unsqueeze(-2), 1.0).prod(-1)


class _Running(ShortGradient):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _running(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        n = x.shape[-1]
        place = torch.arange(n)
        after, from_it = place > place.unsqueeze(1), place >= place.unsqueeze(1)
        # In row k the products of what comes behind k, up to each place.
        behind = _running(torch.where(after, x.unsqueeze(-2), 1.0))
        share = torch.where(from_it, grad.unsqueeze(-2) * behind, 0.0).sum(-1)
        before = torch.where(place == 0, 1.0, _running(x).roll(1, -1))
        return share * before


def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.cumprod``."""
    x = input if dtype is None else input.to(dtype)
    if x.dim() == 0:
        return x.clone()
    if not x.is_floating_point():
        return torch.cumprod(x, dim)
    result: Tensor = _Running.apply(x.movedim(dim, -1))
    return result.movedim(-1, dim)


RECORDED.equals({torch.cumprod: cumprod, Tensor.cumprod: cumprod})
