"""Sparse matrices: a graph's adjacency, constant or made by the step itself.

A graph of standard operators has none. Here one is a ``Sparse``: an object that answers to torch's
functions with arithmetic on its elements' places and values, which is recorded and differentiated
like all other. A function that it does not know raises ExportError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from export.errors import ExportError
from export.insides import BackwardCFunction, FunctionCtx, disable_current_modes, is_fake
from export.rewrites import BESIDE, RECORDED

# A dense product costs a multiplication an element, a sum by rows about as much as 16.
_WORTH = 16
_SMALL = 1 << 16

_INSTEAD = "its indices and values: values times gathered rows, added up with index_add"


def is_sparse(tensor: object) -> bool:
    """Whether it is held by its elements that are not zero, in any of torch's layouts."""
    return isinstance(tensor, Sparse) or (
        isinstance(tensor, Tensor) and tensor.layout != torch.strided
    )


@dataclass(eq=False)
class Sparse:
    """A matrix of one value at each of E places, or what is left of one axis of it.

    ``places`` int64 [E] an axis, ``elements`` float32 [E]. Several at one place add up. A coalesced
    one has them merged and sorted, as torch has, as soon as anybody asks for them.
    """

    places: tuple[Tensor, ...]
    elements: Tensor
    shape: tuple[Any, ...]
    coalesced: bool = False
    merged: bool = False
    _own: Sparse | None = field(default=None, init=False, repr=False)

    device = torch.device("cpu")
    layout = torch.sparse_coo
    is_sparse = True

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", str(function)).removeprefix("_sparse_")
        if name == "addmm":
            return _addmm(*args, **(kwargs or {}))
        own = vars(cls).get(name)
        if not is_sparse(args[0]):
            own, args = _REFLECTED.get(own), (args[1], args[0], *args[2:])
        if own is None:
            raise _refusal(f"{name!r} of a sparse matrix", f"aten.{name}")
        return own(sparse(args[0]), *args[1:], **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # What others ask every object, as whether it is a named tuple.
            raise AttributeError(name)
        raise _refusal(f"{name!r} of a sparse matrix", f"aten.{name}")

    @property
    def dtype(self) -> torch.dtype:
        return self.elements.dtype

    @property
    def requires_grad(self) -> bool:
        return self.elements.requires_grad

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def is_coalesced(self) -> bool:
        return self.coalesced

    def coalesce(self) -> Sparse:
        if self._own is None:
            self._own = self if self.coalesced else replace(self, coalesced=True)
        return self._own

    def is_constant(self) -> bool:
        """Whether it is the model's own, of values that are known and have no gradient."""
        return not (self.requires_grad or any(map(is_fake, (self.elements, *self.places))))

    def _asked_for(self) -> Sparse:
        """Itself, with its elements as torch has them."""
        if self.coalesced and not self.merged:
            merged = _merged_constant if self.is_constant() else _merged
            with torch.enable_grad():
                self.places, self.elements = merged(self)
            self.merged = True
        return self

    def _indices(self) -> Tensor:
        return torch.stack(self._asked_for().places)

    def _values(self) -> Tensor:
        """Without a gradient, as torch's."""
        return self._asked_for().elements.detach()

    def _nnz(self) -> Any:
        return self._asked_for().elements.shape[0]

    def indices(self) -> Tensor:
        self._check_coalesced("indices")
        return self._indices()

    def values(self) -> Tensor:
        self._check_coalesced("values")
        return self._asked_for().elements

    def _check_coalesced(self, name: str) -> None:
        if not self.coalesced:
            raise ExportError(f"{name}() of a sparse matrix that is not coalesced", instead=_SUM)

    def of(self, elements: Tensor) -> Sparse:
        """The same places with other values."""
        return replace(self, elements=elements)

    def detach(self) -> Sparse:
        return self.of(self.elements.detach())

    def clone(self) -> Sparse:
        return self

    def to(self, *given: Any, **named: Any) -> Sparse:
        return self.of(self.elements.to(*given, **named))

    def float(self) -> Sparse:
        return self.of(self.elements.float())

    def to_dense(self) -> Tensor:
        full = torch.zeros(self.shape, dtype=self.dtype)
        return full.index_put(self.places, self.elements, accumulate=True)

    def transpose(self, first: int, second: int) -> Sparse:
        if self.ndim != 2 or (first - second) % 2 == 0:
            return self
        turned = replace(self, places=self.places[::-1], shape=self.shape[::-1])
        turned.coalesced = turned.merged = False
        return turned

    def t(self) -> Sparse:
        return self.transpose(0, 1)

    T = mT = property(t)

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        values = self.elements if dtype is None else self.elements.to(dtype)
        axes = range(self.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
        over = {axis % self.ndim for axis in axes}
        left = [axis for axis in range(self.ndim) if axis not in over]
        if keepdim:
            raise _refusal("a sum of a sparse matrix with keepdim=True", "aten.sum")
        if not left:
            return values.sum()
        places, shape = (tuple(each[axis] for axis in left) for each in (self.places, self.shape))
        return Sparse(places, values, shape, coalesced=True)

    def softmax(self, dim: int, dtype: Any = None) -> Sparse:
        """Over the places that there are along one of two axes."""
        shifted, total, rows = self._over(dim, dtype)
        return self.coalesce().of(torch.exp(shifted) / total[rows])

    def log_softmax(self, dim: int, dtype: Any = None) -> Sparse:
        shifted, total, rows = self._over(dim, dtype)
        return self.coalesce().of(shifted - torch.log(total)[rows])

    def _over(self, dim: int, dtype: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Values less the largest of their row, and the sum of their exponentials by rows."""
        own = self.coalesce()._asked_for()
        values = own.elements if dtype is None else own.elements.to(dtype)
        rows, n = own.places[1 - dim % 2], own.shape[1 - dim % 2]
        none = torch.zeros(n, dtype=values.dtype)
        most = none.scatter_reduce(0, rows, values.detach(), "amax", include_self=False)
        shifted = values - most[rows]
        return shifted, none.index_add(0, rows, torch.exp(shifted)), rows

    def __neg__(self) -> Sparse:
        return self.of(-self.elements)

    neg = __neg__

    def __mul__(self, other: Any) -> Sparse:
        return self.of(self.elements * self._beside(other, "product"))

    def __truediv__(self, other: Any) -> Sparse:
        return self.of(self.elements / self._beside(other, "quotient"))

    __rmul__ = mul = multiply = __mul__
    div = divide = true_divide = __truediv__

    def _beside(self, other: Any, what: str) -> Any:
        """A number, or the values that a dense matrix has at the places that there are."""
        if is_sparse(other):
            raise _refusal(f"a {what} of two sparse matrices by elements", "aten.mul")
        if not isinstance(other, Tensor) or other.dim() == 0:
            return other
        sizes = [1] * (self.ndim - other.dim()) + list(other.shape)
        at = [p if n != 1 else torch.zeros_like(p) for p, n in zip(self.places, sizes, strict=True)]
        return other.reshape(sizes)[tuple(at)]

    def __add__(self, other: Any) -> Sparse:
        if not is_sparse(other):
            raise _refusal("a sparse matrix plus a dense one, in this order", "aten.add")
        other = sparse(other)
        places = tuple(torch.cat(both) for both in zip(self.places, other.places, strict=True))
        elements = torch.cat([self.elements, other.elements])
        return Sparse(places, elements, self.shape, self.coalesced and other.coalesced)

    def __sub__(self, other: Any) -> Sparse:
        return self + -(sparse(other) if is_sparse(other) else other)

    add = __add__
    sub = __sub__

    def __radd__(self, dense: Tensor) -> Tensor:
        return dense.index_put(self.places, self.elements, accumulate=True)

    def __rsub__(self, dense: Tensor) -> Tensor:
        return (-self).__radd__(dense)

    def __matmul__(self, dense: Tensor) -> Tensor:
        """[n, m] times dense [m] or [m, k].

        A constant that is small or filled becomes a dense one; any other product is the sum, by
        rows, of the dense matrix's rows that the elements pick.
        """
        if is_sparse(dense):
            raise _refusal("a product of two sparse matrices", "aten._sparse_sparse_matmul")
        if dense.dim() == 1:
            return (self @ dense.unsqueeze(1)).squeeze(1)
        known = self.is_constant()
        own = self.coalesce()._asked_for() if known else self
        (rows, columns), values, (n, m) = own.places, own.elements, own.shape
        if known and n * m <= max(_SMALL, _WORTH * values.numel()):
            with _known():
                full = torch.zeros(n, m, dtype=values.dtype)
                full[rows, columns] = values
            return full.to(dense.dtype) @ dense
        if dense.dim() > 2:
            raise _refusal("a sparse matrix times a dense tensor of three axes", "aten.matmul")
        picked = dense.index_select(0, columns) * values.to(dense.dtype).unsqueeze(1)
        return torch.zeros(n, dense.shape[1], dtype=dense.dtype).index_add(0, rows, picked)

    matmul = mm = mv = spmm = smm = __matmul__

    def __rmatmul__(self, dense: Tensor) -> Tensor:
        return (self.t() @ dense.t()).t()


_SUM = "matrix.coalesce(), which adds up what stands at one place"
# Where the dense one comes first.
_REFLECTED: dict[Any, Any] = {
    Sparse.__matmul__: Sparse.__rmatmul__,
    Sparse.__mul__: Sparse.__mul__,
    Sparse.__add__: Sparse.__radd__,
    Sparse.__sub__: Sparse.__rsub__,
}


@contextmanager
def _known() -> Iterator[None]:
    """Inside, torch computes with constants, and nothing is recorded."""
    with disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _refusal(what: str, operator: str) -> ExportError:
    return ExportError(what, operator=operator, instead=_INSTEAD)


def sparse(matrix: Any) -> Sparse:
    """A sparse matrix of the model's, of whatever layout, by its elements."""
    if isinstance(matrix, Sparse):
        return matrix
    if is_fake(matrix) or matrix.requires_grad:
        raise _refusal("a sparse matrix that is a parameter or a result", "aten._sparse_mm")
    with _known():
        held = matrix.to_sparse_coo()
        places = tuple(each.clone() for each in held._indices())
        return Sparse(places, held._values().clone(), matrix.shape, held.is_coalesced())


def _merged_constant(matrix: Sparse) -> tuple[tuple[Tensor, ...], Tensor]:
    with _known():
        places = torch.stack(matrix.places)
        held = torch.sparse_coo_tensor(places, matrix.elements, matrix.shape).coalesce()
        return tuple(each.clone() for each in held.indices()), held.values().clone()


def _merged(matrix: Sparse) -> tuple[tuple[Tensor, ...], Tensor]:
    """Places, sorted by row and column, each once, and what their elements add up to."""
    *rows, columns = matrix.places
    m = matrix.shape[-1]
    keys = rows[0] * m + columns if rows else columns
    keys, which = torch.unique(keys, return_inverse=True)
    none = torch.zeros(keys.shape[0], dtype=matrix.dtype)
    places = (keys // m, keys % m) if rows else (keys,)
    return places, none.index_add(0, which, matrix.elements)


def made(indices: Any, values: Any, size: Any = None, **named: Any) -> Sparse:
    """``torch.sparse_coo_tensor``: indices int64 [2, E] or [1, E], values [E]."""
    if size is None or len(size) > 2 or not isinstance(values, Tensor) or values.dim() != 1:
        raise ExportError(
            "a sparse tensor without a size, of more than two axes, or of values that are no "
            "vector",
            operator="aten.sparse_coo_tensor",
            instead="torch.sparse_coo_tensor(indices, values, (n, m)) with a value a place",
        )
    places = torch.as_tensor(indices).long().unbind(0)
    elements = values.to(named.get("dtype") or values.dtype)
    coalesced = bool(named.get("is_coalesced"))
    return Sparse(tuple(places), elements, tuple(size), coalesced, coalesced)


class _Old(type):
    """``torch.sparse.FloatTensor``, which makes matrices and is asked whether something is one."""

    make: Callable[..., Any]

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return cls.make(*given, **named)

    def __instancecheck__(cls, instance: Any) -> bool:
        return is_sparse(instance)


class _Recorded(metaclass=_Old):
    make = made


class _OldBeside(metaclass=_Old):
    """torch's own takes float32 only, also where a step is computed in double."""

    make = torch.sparse_coo_tensor


def _by_rows(*given: Any, **named: Any) -> Sparse:
    raise ExportError(
        "a sparse matrix made by rows or by blocks",
        operator="aten.sparse_compressed_tensor",
        instead="torch.sparse_coo_tensor(indices, values, (n, m))",
    )


def _to_sparse(dense: Tensor, *layout: Any) -> Sparse:
    """``dense.to_sparse()`` [n, m], or [n]: what is not zero."""
    if is_sparse(dense) or not is_fake(dense):
        return sparse(dense)
    if layout or dense.dim() > 2:
        raise _refusal("to_sparse() of more than two axes, or with arguments", "aten.to_sparse")
    places = dense.detach().nonzero().unbind(1)
    return Sparse(places, dense[places], tuple(dense.shape), coalesced=True, merged=True)


def _addmm(added: Tensor, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    result: Tensor = beta * added + alpha * (sparse(a) @ b)
    return result


def _first_sparse(*args: Any, **kwargs: Any) -> bool:
    return any(map(is_sparse, args[:2]))


def _taken(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, one of the first of which is sparse."""
    return lambda *args, **kwargs: Sparse.__torch_function__(function, (), args, kwargs)


def _transposed(tensor: Tensor) -> Any:
    return sparse(tensor).t() if is_sparse(tensor) else tensor.T


# A function of autograd keeps tensors for its backward pass, and is told of which there is one.


def _save(self: Any, *tensors: Any) -> None:
    if any(isinstance(each, Sparse) for each in tensors):
        self._with_sparse = tensors
    else:
        _SAVE(self, *tensors)


def _saved(self: Any) -> Any:
    return getattr(self, "_with_sparse", None) or _SAVED.__get__(self)


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(each, Sparse) and each.requires_grad for each in args):
        raise _refusal(f"a sparse matrix with a gradient, given to {cls.__name__}", "apply")
    return _APPLY.__get__(None, cls)(*args, **kwargs)


_T: Any = Tensor.T
_SAVE: Any = FunctionCtx.save_for_backward
_SAVED: Any = BackwardCFunction.saved_tensors
_APPLY: Any = getattr_static(Function, "apply")  # a method of Python's or of C++'s, unbound

RECORDED.equals(
    {
        torch.sparse_coo_tensor: made,
        torch.sparse_csr_tensor: _by_rows,
        torch.sparse_compressed_tensor: _by_rows,
        Tensor.to_sparse: _to_sparse,
        Tensor.to_sparse_coo: _to_sparse,
        _T.__get__: _transposed,
    }
)
_MEETING = (
    torch.sparse.addmm,
    torch.sparse.mm,
    torch.sparse.softmax,
    torch.sparse.log_softmax,
    torch.addmm,
    torch.mm,
    torch.mv,
    torch.matmul,
    torch.mul,
    torch.spmm,
    torch.smm,
    torch._sparse_sum,
    torch.t,
    torch.transpose,
    Tensor._indices,
    Tensor._values,
    Tensor.coalesce,
    Tensor.detach,
    Tensor.div,
    Tensor.float,
    Tensor.indices,
    Tensor.mm,
    Tensor.matmul,
    Tensor.mul,
    Tensor.smm,
    Tensor.sum,
    Tensor.t,
    Tensor.to,
    Tensor.to_dense,
    Tensor.transpose,
    Tensor.values,
    Tensor.__matmul__,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.__truediv__,
)
RECORDED.equals({function: _taken(function) for function in _MEETING}, of=_first_sparse)
RECORDED.replaces(
    (torch.sparse, "FloatTensor", _Recorded),
    (Function, "apply", classmethod(_applied)),
    (FunctionCtx, "save_for_backward", _save),
    (BackwardCFunction, "saved_tensors", property(_saved)),
)
BESIDE.replaces((torch.sparse, "FloatTensor", _OldBeside))
