"""Sums, products, extremes and orderings along axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from export.lowering.channels import exchanged, held_first, other_axis, swapped
from export.lowering.graph import Graph, Scalar, Value
from export.lowering.registry import lowers
from export.symbols import Dim, expression, fixed, may_be_empty

aten = torch.ops.aten


def _axes(value: Value, dims: Sequence[int] | int | None) -> list[int]:
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(value.rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return sorted(dim % max(value.rank, 1) for dim in listed)


# onnxruntime adds one element after the other, in so many lanes where the last axis is among
# those reduced: 300,000 rows of 3 are summed with an error of 8e-5, 65,536 numbers with 1e-6.
_LANES = 16
# From how many additions in a row on a sum is taken in two stages, each about the root of them.
_LONG = 2048
# What an axis without a fixed size is taken to have here, and the least group worth a stage.
_USUAL, _LEAST_GROUP = 256, 32


def _in_stages(g: Graph, op_type: str, value: Value, axes: Sequence[int], keepdims: bool) -> str:
    """A sum or mean, of groups first where it is long: as exact as torch's, and faster."""
    if op_type in ("ReduceSum", "ReduceMean") and value.dtype == torch.float32:
        value = _of_groups(g, op_type, value, axes)
        if _is_slow(value, axes):
            return _of_rows(g, op_type, value, keepdims)
    return g.op(op_type, value, g.ints(axes), keepdims=int(keepdims))


# onnxruntime 1.31 sums so many rows of so many numbers one number at a time: 31 us for [256, 128]
# and 10 for [300, 128], where a product takes 6 and is the more exact. Below the least size there
# is nothing to gain.
_MOST_ROWS, _MOST_COLUMNS, _LEAST_NUMBERS = 256, 256, 16384


def _is_slow(value: Value, axes: Sequence[int]) -> bool:
    """Whether it is rows that are summed, of such a size when the step was recorded."""
    shape = value.shape
    if not axes or list(axes) != list(range(value.rank - 1)):
        return False
    if fixed(shape[-1]) is None or any(map(may_be_empty, shape)):
        return False
    *lead, columns = (s.node.hint if isinstance(s, torch.SymInt) else s for s in shape)
    rows = math.prod(lead)
    return rows <= _MOST_ROWS and columns <= _MOST_COLUMNS and rows * columns >= _LEAST_NUMBERS


def _of_rows(g: Graph, op_type: str, value: Value, keepdims: bool) -> str:
    """The sum or mean over all axes but the last, by a product with ones: a bias's gradient."""
    rows, columns = math.prod(value.shape[:-1]), value.shape[-1]
    ones = g.full([1, rows], 1, value.dtype)
    total = g.op("MatMul", ones, g.reshape(value, [rows, columns]))
    if op_type == "ReduceMean":
        total = g.op("Div", total, g.scalar(rows, value.dtype))
    lead = [1] * (value.rank - 1) if keepdims else []
    return g.reshape(Value(total, value.dtype, (1, columns)), [*lead, columns])


def _of_groups(g: Graph, op_type: str, value: Value, axes: Sequence[int]) -> Value:
    """The sums or means of groups of neighbours along ``axes``; few values as they are."""
    shape = value.shape
    total = math.prod(
        _multiple(shape[axis]) * (_USUAL ** (fixed(shape[axis]) is None)) for axis in axes
    )
    if total // (_LANES if value.rank - 1 in axes else 1) <= _LONG:
        return value
    found = [group for group in _groups(shape, axes) if group[0] >= _LEAST_GROUP]
    if not found:
        return value
    size, first, last, part = min(found, key=lambda each: abs(math.log(each[0] ** 2 / total)))
    kept = (*shape[:first], shape[first] // part, *[1] * (last - first))
    after = shape[last + 1 :]
    # Behind axes of size 1, so that a group lies in one row.
    lined = all(fixed(each) == 1 for each in after)
    split = (*kept, *after, size) if lined else (*kept, size, *after)
    axis = len(split) - 1 if lined else last + 1
    grouped = g.op(op_type, g.reshape(value, split), g.ints([axis]), keepdims=0)
    return Value(grouped, value.dtype, (*kept, *after))


def _groups(shape: Sequence[Dim], axes: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Ways to group neighbours: size, first and last axis, and its part of the first axis."""
    for last in reversed(axes):
        inner, first = 1, last
        while first in axes:
            whole = _multiple(shape[first])
            for part in range(1, math.isqrt(whole) + 1):
                if whole % part == 0:
                    yield inner * part, first, last, part
                    yield inner * (whole // part), first, last, whole // part
            if fixed(shape[first]) is None:
                break
            inner, first = inner * whole, first - 1


def _multiple(size: Dim) -> int:
    """The largest number that divides a size, whatever the axes' sizes."""
    return int(expression(size).as_content_primitive()[0])


def reduce(
    g: Graph,
    op_type: str,
    value: Value,
    dims: Sequence[int] | int | None,
    keepdim: bool,
    dtype: torch.dtype,
) -> str:
    """One ONNX reduction over ``dims`` (all of them where None or empty)."""
    name = g.cast(value, dtype)
    if value.rank == 0:
        return name
    axes = _axes(value, dims)
    if op_type == "ReduceMean" and any(may_be_empty(value.shape[axis]) for axis in axes):
        # The mean of nothing is NaN in torch, and 0 in onnxruntime.
        total = reduce(g, "ReduceSum", value, dims, keepdim, dtype)
        count: Dim = 1
        for axis in axes:
            count = count * value.shape[axis]
        return g.op("Div", total, g.scalar(count, dtype))
    first = held_first(g, name)
    if first is None:
        return _in_stages(g, op_type, Value(name, dtype, value.shape), axes, keepdim)
    there = sorted(map(other_axis, axes))
    result = _in_stages(g, op_type, Value(first, dtype, swapped(value.shape)), there, keepdim)
    if keepdim:
        return exchanged(g, result, value.rank)
    return result if {0, 1} & set(axes) else exchanged(g, result, value.rank - len(axes))


def _reduction(op_type: str) -> Any:
    def lower(g: Graph, out: Any, a: Value, dims: Any = None, keepdim: bool = False) -> str:
        return reduce(g, op_type, a, dims, keepdim, out.dtype)

    return lower


for _name, _operators in {
    "ReduceSum": (aten.sum.default, aten.sum.dim_IntList),
    "ReduceMean": (aten.mean.default, aten.mean.dim),
    "ReduceMax": (aten.max.default, aten.amax.default),
    "ReduceMin": (aten.min.default, aten.amin.default),
    "ReduceProd": (aten.prod.default, aten.prod.dim_int, torch.ops.prims.prod.default),
    "ReduceLogSumExp": (aten.logsumexp.default,),
}.items():
    lowers(*_operators)(_reduction(_name))


@lowers(torch.ops.prims.var.default)
def variance(g: Graph, out: Any, a: Value, dims: Any, correction: float | None = 1) -> str:
    axes = _axes(a, dims)
    centred = g.op("Sub", a, _in_stages(g, "ReduceMean", a, axes, True))
    squared = Value(g.op("Mul", centred, centred), a.dtype, a.shape)
    squares = _in_stages(g, "ReduceSum", squared, axes, False)
    count: Any = 1
    for axis in axes:
        count = count * a.shape[axis]
    return g.op("Div", squares, g.scalar(count - int(correction or 0), out.dtype))


def _truth(op_type: str) -> Any:
    def lower(g: Graph, a: Value, dims: Any = None, keepdim: bool = False) -> str:
        truth = g.cast(g.cast(a, torch.bool), torch.int32)
        reduced = reduce(g, op_type, Value(truth, torch.int32, a.shape), dims, keepdim, torch.int32)
        return g.cast(reduced, torch.bool)

    return lower


lowers(aten.any.default, aten.any.dim, aten.any.dims)(_truth("ReduceMax"))
lowers(aten.all.default, aten.all.dim, aten.all.dims)(_truth("ReduceMin"))


def _narrow(value: Value) -> bool:
    """Whether the type is one that ONNX or onnxruntime cannot order."""
    return value.dtype in (torch.bool, torch.uint8)


def _arg(op_type: str) -> Any:
    def lower(g: Graph, out: Any, a: Value, dim: int | None = None, keepdim: bool = False) -> str:
        if _narrow(a):
            a = Value(g.cast(a, torch.int32), torch.int32, a.shape)
        if dim is None:
            flat = g.op("Reshape", a, g.ints([-1]))
            result = g.op(op_type, flat, axis=0, keepdims=0)
            return g.reshape(result, out.shape) if keepdim else result
        return g.op(op_type, a, axis=dim, keepdims=int(keepdim))

    return lower


lowers(aten.argmax.default)(_arg("ArgMax"))
lowers(aten.argmin.default)(_arg("ArgMin"))


def _extreme(arg: str) -> Any:
    def lower(g: Graph, a: Value, dim: int, keepdim: bool = False) -> tuple[str, str]:
        known = Value(g.cast(a, torch.int32), torch.int32, a.shape) if _narrow(a) else a
        index = g.op(arg, known, axis=dim, keepdims=1)
        value = g.op("GatherElements", a, index, axis=dim)
        if keepdim:
            return value, index
        axes = g.ints([dim])
        return g.op("Squeeze", value, axes), g.op("Squeeze", index, axes)

    return lower


lowers(aten.max.dim)(_extreme("ArgMax"))
lowers(aten.min.dim)(_extreme("ArgMin"))


@lowers(aten.topk.default)
def topk(g: Graph, a: Value, k: Any, *, settings: Mapping[str, Any]) -> tuple[str, ...]:
    flags = {key: int(settings[key]) for key in ("largest", "sorted")}
    return g.multi("TopK", a, g.dim(k), outputs=2, axis=settings["dim"], **flags)


@lowers(aten.sort.default, aten.sort.stable)
def sort(g: Graph, a: Value, *, dim: int = -1, descending: bool = False) -> tuple[str, ...]:
    # TopK gives equal values in the order of their indices, either way round: always stable.
    size = g.dim(a.shape[dim])
    return g.multi("TopK", a, size, outputs=2, axis=dim, largest=int(descending), sorted=1)


@lowers(aten.cumsum.default)
def cumsum(g: Graph, out: Any, a: Value, dim: int) -> str:
    if a.rank == 0:
        return g.cast(a, out.dtype)
    axis = g.scalar(dim % a.rank, torch.int64)
    return g.op("CumSum", g.cast(a, out.dtype), axis)


def _softmax(op_type: str, of_number: float) -> Any:
    def lower(g: Graph, out: Any, a: Value, dim: int) -> str:
        if a.rank == 0:
            return g.scalar(of_number, out.dtype)
        return g.op(op_type, g.cast(a, out.dtype), axis=dim)

    return lower


lowers(aten._softmax.default)(_softmax("Softmax", 1))
lowers(aten._log_softmax.default)(_softmax("LogSoftmax", 0))


# Matrix products.

aten = torch.ops.aten


def _untransposed(g: Graph, value: Value) -> tuple[str, int]:
    """A matrix and whether Gemm must transpose it: a Transpose before a product costs a copy."""
    producer = g.producer.get(value.name)
    if producer is not None and producer.op_type == "Transpose":
        order = list(producer.attribute[0].ints)
        if order == [1, 0]:
            return producer.input[0], 1
    return value.name, 0


def gemm(
    g: Graph,
    a: Value,
    b: Value,
    bias: Value | None = None,
    alpha: Scalar = 1.0,
    beta: Scalar = 1.0,
) -> str:
    """alpha * a @ b + beta * bias, with transposes folded into the product."""
    left, left_transposed = _untransposed(g, a)
    right, right_transposed = _untransposed(g, b)
    return g.op(
        "Gemm",
        left,
        right,
        bias,
        transA=left_transposed or None,
        transB=right_transposed or None,
        alpha=float(alpha) if alpha != 1 else None,
        beta=float(beta) if beta != 1 else None,
    )


@lowers(aten.mm.default)
def mm(g: Graph, a: Value, b: Value) -> str:
    return gemm(g, a, b)


@lowers(aten.addmm.default)
def addmm(g: Graph, bias: Value, a: Value, b: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> str:
    return gemm(g, a, b, bias, alpha=alpha, beta=beta)


@lowers(aten.bmm.default)
def bmm(g: Graph, a: Value, b: Value) -> str:
    return g.op("MatMul", a, b)


@lowers(aten.baddbmm.default)
def baddbmm(
    g: Graph, out: Any, bias: Value, a: Value, b: Value, *, beta: Scalar = 1, alpha: Scalar = 1
) -> str:
    product = g.op("MatMul", a, b)
    if alpha != 1:
        product = g.op("Mul", product, g.scalar(alpha, out.dtype))
    added = bias.name if beta == 1 else g.op("Mul", bias, g.scalar(beta, out.dtype))
    return g.op("Add", product, added)


@lowers(aten.mv.default)
def mv(g: Graph, a: Value, b: Value) -> str:
    # As a column: onnxruntime 1.31 joins a Transpose into a MatMul with a vector and gets it wrong.
    column = Value(g.op("Unsqueeze", b, g.ints([1])), b.dtype, (*b.shape, 1))
    return g.op("Squeeze", gemm(g, a, column), g.ints([1]))


@lowers(aten.dot.default)
def dot(g: Graph, a: Value, b: Value) -> str:
    return g.op("MatMul", a, b)
