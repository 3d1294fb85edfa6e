"""Inverses, determinants and Cholesky factors of small square matrices, column by column.

Inverses are by elimination (Gauss and Jordan), with a column's largest number as its pivot, as in
LAPACK. Where torch raises for a singular matrix, the step is not finite, and the device refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from export.errors import ExportError
from export.lowering.registry import decomposes
from export.rewrites import RECORDED
from export.short_gradients import ShortGradient

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


class _Inverse(ShortGradient):
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
    result: tuple[Tensor, Tensor, Tensor] = _Inverse.apply(a)
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


def solve_triangular(
    A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """``torch.linalg.solve_triangular``; of more rows only by constants."""
    if A.shape[-1] > _MOST:
        own = torch.linalg.solve_triangular
        solved: Tensor = own(A, B, upper=upper, left=left, unitriangular=unitriangular)
        return solved
    rows = A.triu(int(unitriangular)) if upper else A.tril(-int(unitriangular))
    if unitriangular:
        rows = rows + torch.eye(A.shape[-1], dtype=A.dtype)
    return inv(rows) @ B if left else B @ inv(rows)


class _Cholesky(ShortGradient):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        n = a.shape[-1]
        row = torch.arange(n)
        columns: list[Tensor] = []
        rest = a
        for c in range(n):
            column = rest[..., c] / torch.sqrt(rest[..., c : c + 1, c])
            columns.append(torch.where(row >= c, column, 0.0))
            rest = rest - columns[c].unsqueeze(-1) * columns[c].unsqueeze(-2)
        lower = torch.stack(columns, -1)
        ctx.save_for_backward(lower)
        return lower

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Murray 2016, section 4.1: of a symmetric matrix, half to each of two places."""
        (lower,) = ctx.saved_tensors
        turned = lower.transpose(-1, -2)
        inverse = _Inverse.apply(lower)[0]
        inner = (turned @ grad).tril()
        inner = inner - 0.5 * inner.diagonal(dim1=-2, dim2=-1).diag_embed()
        share = inverse.transpose(-1, -2) @ inner @ inverse
        total: Tensor = 0.5 * (share + share.transpose(-1, -2))
        return total


def cholesky(input: Tensor, upper: bool = False) -> Tensor:
    """``torch.linalg.cholesky``: not finite where torch raises, of what is not positive definite.

    It reads the lower triangle alone, as torch's; of more rows only constants have one.
    """
    if input.shape[-1] > _MOST:
        factor: Tensor = torch.linalg.cholesky(input, upper=upper)
        return factor
    lower: Tensor = _Cholesky.apply(input)
    return lower.transpose(-1, -2) if upper else lower


def cholesky_ex(input: Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    """``torch.linalg.cholesky_ex``, of which a failure makes the step not finite."""
    info = torch.zeros(input.shape[:-2], dtype=torch.int32)
    return torch.return_types.linalg_cholesky_ex((cholesky(input, upper), info))  # type: ignore[attr-defined]


def cholesky_solve(input: Tensor, L: Tensor, upper: bool = False) -> Tensor:
    """``torch.cholesky_solve``."""
    inverse = inv(L.triu() if upper else L.tril())
    turned = inverse.transpose(-1, -2)
    return (inverse @ turned if upper else turned @ inverse) @ input


def cholesky_inverse(input: Tensor, upper: bool = False) -> Tensor:
    """``torch.cholesky_inverse``."""
    return cholesky_solve(torch.eye(input.shape[-1], dtype=input.dtype), input, upper)


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


def _of_constants(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """By the inverse, which is a constant where the matrix is one: a prior's covariance."""
    part = a.triu(int(unitriangular)) if upper else a.tril(-int(unitriangular))
    whole = part + torch.eye(a.shape[-1], dtype=a.dtype) if unitriangular else part
    inverse: Tensor = torch.ops.aten.linalg_inv_ex(whole)[0]
    return inverse @ b if left else b @ inverse


decomposes({torch.ops.aten.linalg_solve_triangular.default: _of_constants})
RECORDED.equals(
    {
        **dict.fromkeys((torch.linalg.inv, torch.inverse, Tensor.inverse), inv),
        torch.linalg.solve: solve,
        torch.linalg.solve_triangular: solve_triangular,
        torch.linalg.cholesky_ex: cholesky_ex,
        **dict.fromkeys((torch.linalg.cholesky, torch.cholesky, Tensor.cholesky), cholesky),
        **dict.fromkeys((torch.cholesky_solve, Tensor.cholesky_solve), cholesky_solve),
        **dict.fromkeys((torch.cholesky_inverse, Tensor.cholesky_inverse), cholesky_inverse),
        **dict.fromkeys((torch.linalg.slogdet, torch.slogdet, Tensor.slogdet), slogdet),
        **dict.fromkeys((torch.logdet, Tensor.logdet), logdet),
        **dict.fromkeys((torch.linalg.det, torch.det, Tensor.det), det),
    }
)
