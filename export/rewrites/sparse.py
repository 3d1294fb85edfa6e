"""Products of a constant sparse matrix and a dense one: a graph's adjacency, most of all.

A small or a filled matrix becomes a dense constant; any other the sum, by rows, of the dense
matrix's rows that its elements pick.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

from export.errors import ExportError

# A dense product costs a multiplication an element, a sum by rows about as much as 16.
_WORTH = 16
_SMALL = 1 << 16


def is_sparse(tensor: object) -> bool:
    """Whether a tensor is held by its elements that are not zero, in any of torch's layouts."""
    return isinstance(tensor, Tensor) and tensor.layout != torch.strided


def _elements(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and values of the elements, whatever the layout."""
    if is_fake(matrix) or matrix.requires_grad:
        raise ExportError(
            "a sparse matrix that is no constant",
            operator="aten._sparse_mm",
            instead="values times gathered rows, added up with index_add",
        )
    with _disable_current_modes(), torch.no_grad():
        held = matrix.to_sparse_coo().coalesce()
        rows, columns = held.indices()
        return rows.clone(), columns.clone(), held.values().clone()


def product(matrix: Tensor, dense: Tensor) -> Tensor:
    """matrix [n, m], sparse and constant, times dense [m] or [m, k]."""
    rows, columns, values = _elements(matrix)
    if dense.dim() == 1:
        return product(matrix, dense.unsqueeze(1)).squeeze(1)
    n, m = matrix.shape
    if n * m <= max(_SMALL, _WORTH * values.numel()):
        with _disable_current_modes():
            full = torch.zeros(n, m, dtype=values.dtype)
            full[rows, columns] = values
        return full.to(dense.dtype) @ dense
    picked = dense.index_select(0, columns) * values.to(dense.dtype).unsqueeze(1)
    return torch.zeros(n, dense.shape[1], dtype=dense.dtype).index_add(0, rows, picked)


def matmul(original: Any) -> Any:
    """``original(a, b)``, where either may be sparse."""

    def run(a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        if is_sparse(a):
            return product(a, b)
        if is_sparse(b):
            with _disable_current_modes():
                turned = b.to_sparse_coo().transpose(0, 1)
            return product(turned, a.transpose(0, 1)).transpose(0, 1)
        return original(a, b, *rest, **named)

    return run


def addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``torch.sparse.addmm``: beta * added + alpha * a @ b."""
    return beta * added + alpha * product(a, b)


EQUALS: dict[Any, Any] = {
    torch.sparse.addmm: addmm,
    **{
        function: matmul(function)
        for function in (
            torch.sparse.mm,
            torch.mm,
            torch.matmul,
            torch.spmm,
            torch.smm,
            Tensor.mm,
            Tensor.matmul,
            Tensor.smm,
            Tensor.__matmul__,
        )
    },
}
