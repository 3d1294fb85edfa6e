"""Inverses and determinants of small square matrices, by elimination (Gauss and Jordan).

A column's pivot is its largest number, as in LAPACK. Where torch raises for a singular matrix, the
step is not finite, and the device refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from export.errors import ExportError
from export.rewrites import Equals

_MOST = 64
"""Rows: a column is a dozen nodes of the graph."""


def _eliminated(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of a [.., n, n], and the sign and the logarithm of its determinant [..]."""
    n = a.shape[-1]
    row = torch.arange(n)
    work = torch.cat([a, torch.eye(n, dtype=a.dtype).expand_as(a)], -1)
    sign = torch.ones_like(a[..., 0, 0])
    log = torch.zeros_like(sign)
    for c in range(n):
        column = work[..., c].abs()
        place = torch.where(row >= c, column, -1.0).argmax(-1, keepdim=True)
        pivot = torch.where((row == place).unsqueeze(-1), work, 0.0).sum(-2, keepdim=True)
        instead = torch.where((row == place).unsqueeze(-1), work[..., c : c + 1, :], work)
        value = pivot[..., c : c + 1]
        pivot = pivot / value
        rest = instead - instead[..., c : c + 1] * pivot
        work = torch.where((row == c).unsqueeze(-1), pivot, rest)
        swapped = torch.where(place[..., 0] == c, 1.0, -1.0)
        sign = sign * swapped * torch.sign(value[..., 0, 0])
        log = log + torch.log(value[..., 0, 0].abs())
    return work[..., n:], sign, log


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inverse, sign, log = _eliminated(a)
        ctx.save_for_backward(inverse)
        ctx.mark_non_differentiable(sign)
        ctx.set_materialize_grads(False)
        return inverse, sign, log

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any, of_log: Tensor | None) -> Tensor | None:
        turned = ctx.saved_tensors[0].transpose(-1, -2)
        total = None if grad is None else -(turned @ grad @ turned)
        if of_log is None:
            return total
        share: Tensor = of_log[..., None, None] * turned
        return share if total is None else total + share


def _inverse(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = a.shape[-1]
    if not isinstance(n, int) or n > _MOST:
        raise ExportError(
            f"the inverse or determinant of matrices of {n} rows",
            operator="aten.linalg_inv_ex",
            instead=f"at most {_MOST} rows, a fixed number; larger ones belong outside the step",
        )
    result: tuple[Tensor, Tensor, Tensor] = _Inverse.apply(a)  # type: ignore[no-untyped-call]
    return result


def inv(A: Tensor) -> Tensor:
    """``torch.linalg.inv``."""
    return _inverse(A)[0]


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """``torch.linalg.solve``."""
    inverse = inv(A)
    if not left:
        return B @ inverse
    if B.dim() == 1 or B.shape == A.shape[:-1]:
        return (inverse @ B.unsqueeze(-1)).squeeze(-1)
    return inverse @ B


def slogdet(A: Tensor) -> Any:
    """``torch.linalg.slogdet``."""
    return torch.return_types.linalg_slogdet(_inverse(A)[1:])  # type: ignore[attr-defined]


def logdet(input: Tensor) -> Tensor:
    """``torch.logdet``: NaN of a negative determinant."""
    _, sign, log = _inverse(input)
    return torch.where(sign < 0, torch.nan, log)


def det(A: Tensor) -> Tensor:
    """``torch.linalg.det`` of regular matrices."""
    _, sign, log = _inverse(A)
    return sign * torch.exp(log)


EQUALS: Equals = {
    **dict.fromkeys((torch.linalg.inv, torch.inverse, Tensor.inverse), inv),
    torch.linalg.solve: solve,
    **dict.fromkeys((torch.linalg.slogdet, torch.slogdet, Tensor.slogdet), slogdet),
    **dict.fromkeys((torch.logdet, Tensor.logdet), logdet),
    **dict.fromkeys((torch.linalg.det, torch.det, Tensor.det), det),
}
