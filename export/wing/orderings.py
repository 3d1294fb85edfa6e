"""Operators along an axis, by those that ONNX has: sorts, comparisons, sums, running products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from export.lowering.registry import decomposes
from export.rewrites import RECORDED
from export.short_gradients import ShortGradient

aten = torch.ops.aten


def searchsorted(
    sorted_sequence: Tensor,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """``torch.searchsorted``: how many of a row's numbers come before a value, NaN being last."""
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    value = torch.as_tensor(self, dtype=sorted_sequence.dtype)
    rows = sorted_sequence if sorted_sequence.dim() == 1 else sorted_sequence.unsqueeze(-2)
    compare = torch.gt if right or side == "right" else torch.ge
    count = (~compare(rows, value.unsqueeze(-1))).sum(-1)
    return count.to(torch.int32) if out_int32 else count


def bucketize(
    a: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    """``torch.bucketize``: how many boundaries lie below each value, or at it with ``right``."""
    below = (torch.le if right else torch.lt)(boundaries, a.unsqueeze(-1))
    return below.sum(-1).to(torch.int32 if out_int32 else torch.int64)


def kthvalue(a: Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``torch.kthvalue``: the k-th smallest value and where it stands."""
    if a.dim() == 0:
        return a.clone(), torch.zeros((), dtype=torch.int64)
    values, places = aten.sort(a, dim)
    found = values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1)
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def median_dim(a: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``torch.median`` along an axis: of two values in the middle the lower."""
    length = a.shape[dim] if a.dim() else 1
    return kthvalue(a, (length + 1) // 2, dim, keepdim)


def median(a: Tensor) -> Tensor:
    """``torch.median`` of all elements."""
    return median_dim(a.reshape(-1), 0)[0]


def _up_to(n: Any) -> Tensor:
    """[n, n]: in row i the places up to i."""
    place = torch.arange(n)
    return place.unsqueeze(1) >= place


def _so_far(a: Tensor, dim: int, sign: int) -> tuple[Tensor, Tensor]:
    """The largest of ``sign`` times the values so far, and the last place of it."""
    if a.dim() == 0:
        return a.clone(), torch.zeros((), dtype=torch.int64)
    rows = a.movedim(dim, -1)
    n = rows.shape[-1]
    compared = (rows if rows.is_floating_point() else rows.to(torch.int64)) * sign
    least = -torch.inf if rows.is_floating_point() else torch.iinfo(torch.int64).min
    square = torch.where(_up_to(n), compared.unsqueeze(-2), least)
    places = n - 1 - square.flip(-1).argmax(-1)
    return rows.gather(-1, places).movedim(-1, dim), places.movedim(-1, dim)


def cummax(a: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``torch.cummax``."""
    return _so_far(a, dim, 1)


def cummin(a: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``torch.cummin``."""
    return _so_far(a, dim, -1)


def logcumsumexp(a: Tensor, dim: int) -> Tensor:
    """``torch.logcumsumexp``, each row of sums less its own largest term."""
    if a.dim() == 0:
        return a.clone()
    rows = a.movedim(dim, -1)
    square = torch.where(_up_to(rows.shape[-1]), rows.unsqueeze(-2), -torch.inf)
    largest = square.amax(-1, keepdim=True)
    largest = torch.where(largest.isinf(), 0.0, largest)
    total = torch.log(torch.exp(square - largest).sum(-1)) + largest.squeeze(-1)
    return total.movedim(-1, dim)


decomposes(
    {
        aten.searchsorted.Tensor: searchsorted,
        aten.searchsorted.Scalar: searchsorted,
        aten.bucketize.Tensor: bucketize,
        aten.kthvalue.default: kthvalue,
        aten.median.dim: median_dim,
        aten.median.default: median,
        aten.cummax.default: cummax,
        aten.cummin.default: cummin,
        aten.logcumsumexp.default: logcumsumexp,
    }
)


# Running products, with a gradient that is right beside zeros and at any length.


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
