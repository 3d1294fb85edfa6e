"""Distances between rows, with a gradient of 0 where a distance is 0, as torch has it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.errors import ExportError
from export.rewrites import RECORDED
from export.short_gradients import ShortGradient

# From this many rows on torch takes distances from one matrix product, which saves the
# differences [.., n, m, d] at the cost of digits where rows are close to each other.
_ROWS = 25


class _Euclidean(ShortGradient):
    """[.., n, d] and [.., m, d] to [.., n, m], by differences or by one product."""

    plain = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, by_product: bool) -> Tensor:
        if by_product:
            squares = (x * x).sum(-1, keepdim=True) + (y * y).sum(-1).unsqueeze(-2)
            distance = (squares - 2 * (x @ y.transpose(-2, -1))).clamp(min=0).sqrt()
        else:
            gap = x.unsqueeze(-2) - y.unsqueeze(-3)
            distance = (gap * gap).sum(-1).sqrt()
        ctx.by_product = by_product
        ctx.save_for_backward(x, y, distance)
        return distance

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y, distance = ctx.saved_tensors
        share = torch.where(distance == 0, 0.0, grad / distance)
        if ctx.by_product:
            of_x = x * share.sum(-1, keepdim=True) - share @ y
            of_y = y * share.sum(-2).unsqueeze(-1) - share.transpose(-2, -1) @ x
        else:
            pull = share.unsqueeze(-1) * (x.unsqueeze(-2) - y.unsqueeze(-3))
            of_x, of_y = pull.sum(-2), -pull.sum(-3)
        return of_x.sum_to_size(x.shape), of_y.sum_to_size(y.shape), None


def cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str | None = "use_mm_for_euclid_dist_if_necessary",
) -> Tensor:
    """``torch.cdist``: x1 [.., n, d] and x2 [.., m, d] to [.., n, m]."""
    lead = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    x1, x2 = (x.expand(*lead, *x.shape[-2:]) for x in (x1, x2))
    if p == 2:
        many = any(isinstance(x.shape[-2], int) and x.shape[-2] > _ROWS for x in (x1, x2))
        by_product = compute_mode != "donot_use_mm_for_euclid_dist" and (
            many or compute_mode == "use_mm_for_euclid_dist"
        )
        distance: Tensor = _Euclidean.apply(x1, x2, by_product)
        return distance
    return _norm((x1.unsqueeze(-2) - x2.unsqueeze(-3)), p)


def _norm(gap: Tensor, p: float) -> Tensor:
    if p < 1:
        raise ExportError(
            f"distances with p = {p}", operator="aten.cdist", instead="p of 1 or more"
        )
    size = gap.abs()
    if p == 1:
        return size.sum(-1)
    if p == float("inf"):
        return size.amax(-1)
    powers = size.pow(p).sum(-1)
    far = powers > 0
    return torch.where(far, torch.where(far, powers, 1.0).pow(1 / p), 0.0)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """``torch.pdist``: the upper triangle of ``cdist`` of [n, d] with itself."""
    number = torch.arange(input.shape[0])
    later = number.unsqueeze(1) < number
    return cdist(input, input, p, "donot_use_mm_for_euclid_dist")[later]


RECORDED.equals({functional.pdist: pdist, torch.cdist: cdist, torch.pdist: pdist})
