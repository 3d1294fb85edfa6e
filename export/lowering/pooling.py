"""Pooling and its gradients: averages and maxima over windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from export.errors import ExportError
from export.lowering.channels import SMALL_IMAGE
from export.lowering.graph import NUMPY_DTYPE, Graph, Value
from export.lowering.registry import lowers
from export.symbols import Dim, fixed, same

# What every kind of pooling asks of its windows: sizes along the axes, and a batch axis.


def along_axes(values: int | Sequence[int], rank: int, default: Sequence[int] = ()) -> list[int]:
    """One number an axis, of a single one for all, of all, or of none (then ``default``)."""
    listed = [values] if isinstance(values, int) else [int(value) for value in values]
    listed = listed or list(default)
    return listed * rank if len(listed) == 1 else listed


@dataclass(frozen=True)
class _Windows:
    """How an operator's windows lie along each axis: sizes, steps, padding, and taps apart."""

    window: Sequence[int]
    steps: Sequence[int]
    begins: Sequence[int]
    spread: Sequence[int]

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.window)


def _windows(rank: int, settings: Mapping[str, Any]) -> _Windows:
    window = along_axes(settings["kernel_size"], rank)
    return _Windows(
        window,
        along_axes(settings.get("stride") or (), rank, window),
        along_axes(settings.get("padding", 0), rank),
        along_axes(settings.get("dilation", 1), rank),
    )


def fixed_sizes(sizes: Sequence[Dim], operator: str) -> list[int]:
    """The sizes as numbers. Raises ExportError where one depends on a named axis."""
    numbers = [fixed(size) for size in sizes]
    if any(number is None for number in numbers):
        raise ExportError(
            "pooling over an axis that is named as dynamic",
            operator=operator,
            instead="fixed spatial sizes, or a mean or maximum over the whole axis",
        )
    return [number for number in numbers if number is not None]


def with_batch(g: Graph, x: Value, rank: int) -> Value:
    """The value with a batch axis, which torch allows to be absent and ONNX does not."""
    if x.rank == rank + 2:
        return x
    return Value(g.op("Unsqueeze", x, g.ints([0])), x.dtype, (1, *x.shape))


def even_window(x: Value, out: Any, rank: int) -> list[int] | None:
    """The window where the output divides the input evenly, else None."""
    sizes = fixed_sizes(x.shape[-rank:], "aten.adaptive_pool")
    wanted = fixed_sizes(out.shape[-rank:], "aten.adaptive_pool")
    if any(size % want for size, want in zip(sizes, wanted, strict=True)):
        return None
    return [size // want for size, want in zip(sizes, wanted, strict=True)]


# Average pooling and its gradient.

aten = torch.ops.aten


def _reach(
    w: _Windows, axis: int, size: int, positions: int, counts_padding: bool
) -> tuple[int, list[int]]:
    """Padding needed at the end, and how many elements each window counts, along one axis.

    As in torch a window counts at most up to the padded end, or only real elements.
    """
    kernel, stride, padding = w.window[axis], w.steps[axis], w.begins[axis]
    end = max(0, (positions - 1) * stride + kernel - size - padding)
    counts = []
    for place in range(positions):
        begin = place * stride - padding
        stop = min(begin + kernel, size + padding)
        if not counts_padding:
            begin, stop = max(begin, 0), min(stop, size)
        counts.append(stop - begin)
    return end, counts


def _scales(
    w: _Windows, x_sizes: Sequence[int], y_sizes: Sequence[int], settings: Mapping[str, Any]
) -> tuple[list[int], np.ndarray[Any, Any]]:
    """End padding along each axis, and 1 / divisor for each output position."""
    counts_padding = settings.get("count_include_pad", True)
    along = [
        _reach(w, axis, *sizes, counts_padding)
        for axis, sizes in enumerate(zip(x_sizes, y_sizes, strict=True))
    ]
    counts = np.ones([1] * w.rank)
    for axis, (_, numbers) in enumerate(along):
        shape = [-1 if i == axis else 1 for i in range(w.rank)]
        counts = counts * np.asarray(numbers, dtype=np.float64).reshape(shape)
    if settings.get("divisor_override") is not None:
        counts = np.full(list(y_sizes), float(settings["divisor_override"]))
    return [end for end, _ in along], 1 / np.broadcast_to(counts, list(y_sizes))


def _weighted(g: Graph, value: str, factors: np.ndarray[Any, Any], dtype: torch.dtype) -> str:
    """The value times a factor a position; nothing where every factor is 1."""
    if (factors == 1).all():
        return value
    if (factors == factors.flat[0]).all():
        factors = factors.flat[0]
    return g.op("Mul", value, g.constant(np.asarray(factors, dtype=NUMPY_DTYPE[dtype])))


@lowers(aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(g: Graph, out: Any, x: Value, *, settings: Mapping[str, Any]) -> str:
    w = _windows(max(len(settings["kernel_size"]), 2), settings)
    batched = with_batch(g, x, w.rank)
    sizes = fixed_sizes(x.shape[-w.rank :], "aten.avg_pool2d")
    positions = fixed_sizes(out.shape[-w.rank :], "aten.avg_pool2d")
    ends, scales = _scales(w, sizes, positions, settings)
    name = batched.name
    if any(w.begins) or any(ends):
        pads = g.ints([0, 0, *w.begins, 0, 0, *ends])
        name = g.op("Pad", batched, pads, g.scalar(0, x.dtype))
    pooled = g.op("AveragePool", name, kernel_shape=w.window, strides=w.steps)
    # AveragePool divides by the whole window; torch by what it counts.
    result = _weighted(g, pooled, scales * float(np.prod(w.window)), x.dtype)
    return result if batched is x else g.reshape(result, out.shape)


@lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    g: Graph, out: Any, grad: Value, x: Value, *, settings: Mapping[str, Any]
) -> str:
    w = _windows(max(len(settings["kernel_size"]), 2), settings)
    window, steps, begins = w.window, w.steps, w.begins
    sizes = fixed_sizes(x.shape[-w.rank :], "aten.avg_pool2d")
    positions = fixed_sizes(grad.shape[-w.rank :], "aten.avg_pool2d")
    ends, scales = _scales(w, sizes, positions, settings)
    if steps == window and not any(begins) and not any(ends):
        shares = _weighted(g, grad.name, scales, x.dtype)
        spread = _repeated(g, shares, grad.shape, window)
        left = [size - y * k for size, y, k in zip(sizes, positions, window, strict=True)]
        return _padded_end(g, spread, grad.rank, left, x.dtype)
    shares = _weighted(g, grad.name, scales, x.dtype)
    single = g.op("Reshape", shares, g.ints([-1, 1, *positions]))
    ones = g.constant(np.ones([1, 1, *window], dtype=NUMPY_DTYPE[x.dtype]))
    full = g.op("ConvTranspose", single, ones, kernel_shape=window, strides=steps)
    # The reach of the windows, cut at the padding and filled where no window came.
    reach = [(y - 1) * s + k for y, s, k in zip(positions, steps, window, strict=True)]
    last = [size + p - r for size, p, r in zip(sizes, begins, reach, strict=True)]
    if any(begins) or any(last):
        pads = g.ints([0, 0, *(-p for p in begins), 0, 0, *last])
        full = g.op("Pad", full, pads, g.scalar(0, x.dtype))
    return g.op("Reshape", full, g.target(out.shape))


def _padded_end(g: Graph, name: str, rank: int, ends: Sequence[int], dtype: torch.dtype) -> str:
    if not any(ends):
        return name
    lead = [0] * (rank - len(ends))
    return g.op("Pad", name, g.ints([0] * rank + lead + list(ends)), g.scalar(0, dtype))


def _repeated(g: Graph, name: str, shape: Sequence[Dim], window: Sequence[int]) -> str:
    """Each position repeated over its window: [.., y, ..] to [.., y * k, ..]."""
    rank = len(window)
    lead, positions = list(shape[:-rank]), list(shape[-rank:])
    if all(same(size, 1) for size in positions):
        return g.op("Expand", name, g.shape([*lead, *window]))
    # 20 times as fast as an Expand of [.., y, 1] to [.., y, k].
    return g.op(
        "Resize",
        name,
        None,
        g.constant(np.asarray([1] * len(lead) + list(window), dtype=np.float32)),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


def _shares(size: int, wanted: int) -> np.ndarray[Any, Any]:
    """[wanted, size]: row i averages positions floor(i * size / wanted) to the ceiling of i + 1."""
    rows = np.zeros((wanted, size))
    for row in range(wanted):
        begin, end = row * size // wanted, -(-(row + 1) * size // wanted)
        rows[row, begin:end] = 1 / (end - begin)
    return rows


@lowers(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(g: Graph, out: Any, x: Value, sizes: Sequence[int]) -> str:
    window = even_window(x, out, 2)
    if window == [1, 1]:
        return x.name
    if window is not None:
        return avg_pool(g, out, x, settings={"kernel_size": window})
    rows, columns = _adaptive_matrices(g, x, out.shape[-2:])
    return g.op("MatMul", g.op("MatMul", g.constant(rows), x), g.constant(columns.T))


def _adaptive_matrices(
    g: Graph, x: Value, wanted: Sequence[Dim]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    sizes = fixed_sizes(x.shape[-2:], "aten._adaptive_avg_pool2d")
    outputs = fixed_sizes(wanted, "aten._adaptive_avg_pool2d")
    rows, columns = (_shares(s, w) for s, w in zip(sizes, outputs, strict=True))
    dtype = NUMPY_DTYPE[x.dtype]
    return rows.astype(dtype), columns.astype(dtype)


@lowers(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(g: Graph, out: Any, grad: Value, x: Value) -> str:
    window = even_window(x, grad, 2)
    if window == [1, 1]:
        return grad.name
    if window is not None:
        return avg_pool_backward(g, out, grad, x, settings={"kernel_size": window})
    rows, columns = _adaptive_matrices(g, x, grad.shape[-2:])
    return g.op("MatMul", g.op("MatMul", g.constant(rows.T), grad), g.constant(columns))


# Maximum pooling and its gradient.

# What gives -inf of no finite numbers, or by overflow only.
_FINITE = {
    "Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN", "Relu", "Sigmoid",
    "HardSigmoid", "Tanh", "Softplus", "Softmax", "Exp", "Abs", "Erf", "Cast", "Shape",
}  # fmt: skip


def _may_hold_least(g: Graph, name: str) -> bool:
    """Whether a value may hold -inf: of the batch, of constants (masks), or of logarithms."""
    queue, seen = [name], {name}
    while queue:
        current = queue.pop()
        node, known = g.producer.get(current), g.array(current)
        if known is not None:
            if known.dtype.kind == "f" and bool((known == -np.inf).any()):
                return True
        elif node is None:
            if not current.startswith("state."):
                return True
        elif node.op_type == "Log":
            return True
        elif node.op_type not in _FINITE:
            # Of a choice, what it goes by is none of its values.
            sources = set(node.input[node.op_type == "Where" :]) - seen
            queue += sources
            seen |= sources
    return False


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(
    g: Graph, out: Any, x: Value, *, settings: Mapping[str, Any]
) -> tuple[str, str]:
    rank, kernel = x.rank - 1 if x.rank < 4 else x.rank - 2, settings["kernel_size"]
    w = _windows(len(kernel) if len(kernel) > 1 else rank, settings)
    rank, window, steps, begins, spread = w.rank, w.window, w.steps, w.begins, w.spread
    sizes = x.shape[-rank:]
    ends = begins
    if settings.get("ceil_mode"):
        # Explicit padding at the end: runtimes differ in which windows ceil_mode keeps.
        inner = fixed_sizes(sizes, "aten.max_pool2d")
        positions = fixed_sizes(out[0].shape[-rank:], "aten.max_pool2d")
        ends = [
            max(0, (y - 1) * s + d * (k - 1) + 1 - size - p)
            for y, s, d, k, size, p in zip(
                positions, steps, spread, window, inner, begins, strict=True
            )
        ]
    batched = with_batch(g, x, rank)
    pooled = partial(
        g.multi,
        "MaxPool",
        kernel_shape=window,
        strides=steps,
        pads=[*begins, *ends],
        dilations=spread if set(spread) != {1} else None,
    )
    values, flat = pooled(batched, outputs=2)
    if x.dtype == torch.float32 and _may_hold_least(g, x.name):
        # onnxruntime 1.31 has a window of -inf alone as float32's least number. Of halves no number
        # is that low, and only that one is -inf when doubled.
        (values,) = pooled(g.op("Mul", batched, g.scalar(0.5, x.dtype)), outputs=1)
        values = g.op("Mul", values, g.scalar(2.0, x.dtype))
    # ONNX counts indices through the whole tensor, torch within an image's channel.
    plane: Dim = 1
    for size in sizes:
        plane = plane * size
    indices = g.op("Mod", flat, g.scalar(plane, torch.int64))
    return g.reshape(values, out[0].shape) if x is not batched else values, (
        g.reshape(indices, out[1].shape) if x is not batched else indices
    )


def _flat_indices(g: Graph, indices: Value, operator: str) -> str:
    """MaxPool's own indices, through the whole tensor, behind torch's."""
    node = g.producer.get(indices.name)
    while node is not None and node.op_type in ("Reshape", "Unsqueeze", "Squeeze"):
        node = g.producer.get(node.input[0])
    if node is None or node.op_type != "Mod" or g.producer[node.input[0]].op_type != "MaxPool":
        raise ExportError(
            "the indices of a maximum were changed before its gradient",
            operator=operator,
            instead="the pooling's result alone",
        )
    return str(node.input[0])


def _max_pool_gradient(g: Graph, grad: Value, x: Value, indices: Value, apart: bool) -> str:
    """``grad`` added at the places that ``indices`` name, in the shape of ``x``.

    Ties went to one place in the forward pass, and only that place gets the gradient. ``apart``
    says that no two windows overlap, so that no place is named twice.
    """
    flat = _flat_indices(g, indices, "aten.max_pool2d_with_indices_backward")
    if apart and x.rank >= 4:
        places = flat if x.rank == len(indices.shape) else g.reshape(flat, indices.shape)
        # The kernel only serves to guess the output's shape, which is given.
        ones = [1] * (x.rank - 2)
        return g.op("MaxUnpool", grad, places, g.shape(x.shape), kernel_shape=ones, strides=ones)
    elements: Dim = 1
    for size in x.shape:
        elements = elements * size
    added = g.op(
        "ScatterElements",
        g.zeros([elements], x.dtype),
        g.op("Reshape", flat, g.ints([-1])),
        g.op("Reshape", grad, g.ints([-1])),
        axis=0,
        reduction=None if apart else "add",
    )
    return g.op("Reshape", added, g.target(x.shape))


# A maximum's gradient an axis at a time. A window's maximum is the largest of its rows' maxima, and
# the first place that has it, row by row, is the first one of the first row that has it. What each
# tap sees along an axis is the input's positions apart by the stride, shifted: comparisons of whole
# arrays, where onnxruntime's search for indices takes each element by itself and its prediction of
# branches fails. With the pooling itself, in us: [2, 16, 64, 64] by 2 x 2 540 and 240,
# [8, 64, 32, 32] by 3 x 3 with stride 2 4,340 and 2,330, [8, 64, 16, 16] by 5 x 5 with stride 1
# 6,780 and 2,880; but [8, 128, 15, 15] by 3 x 3 with stride 2 1,770 and 2,640.
_MOST_TAPS = 5


@dataclass(frozen=True)
class _Axis:
    """Windows along one axis, the ``axis`` th of the input, of ``size`` positions."""

    axis: int
    size: int
    positions: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def groups(self) -> int:
        """How many strides the axis has, the last one perhaps beyond its end."""
        return -(-self.size // self.stride)

    def shift(self, tap: int) -> tuple[int, int]:
        """By how many strides, and to which position of a stride, a tap looks ahead."""
        return divmod(tap * self.dilation - self.padding, self.stride)


def _padded(
    g: Graph, x: str, rank: int, axis: int, begin: int, end: int, fill: str | None = None
) -> str:
    """The value with positions more, or less where a number is below 0, at an axis's ends."""
    if begin == end == 0:
        return x
    around = [0] * (2 * rank)
    around[axis], around[axis + rank] = begin, end
    return g.op("Pad", x, g.ints(around), fill)


def _seen(g: Graph, x: str, shape: Sequence[Dim], a: _Axis, dtype: torch.dtype) -> list[str]:
    """What each tap sees along an axis: arrays with the axis's positions; -inf in the padding."""
    least = g.scalar(-math.inf, dtype)
    rank, lead, rest = len(shape), list(shape[: a.axis]), list(shape[a.axis + 1 :])
    x = _padded(g, x, rank, a.axis, 0, a.groups * a.stride - a.size, least)
    apart = [x]
    if a.stride > 1:
        split = g.op("Reshape", x, g.target([*lead, a.groups, a.stride, *rest]))
        pieces = g.multi("Split", split, g.ints([1] * a.stride), outputs=a.stride, axis=a.axis + 1)
        apart = [g.op("Reshape", piece, g.target([*lead, a.groups, *rest])) for piece in pieces]
    seen = []
    for ahead, place in map(a.shift, range(a.kernel)):
        end = ahead + a.positions - a.groups
        seen.append(_padded(g, apart[place], rank, a.axis, -ahead, end, least))
    return seen


def _to_first(
    g: Graph, grad: str, seen: list[str], shape: Sequence[Dim], a: _Axis, dtype: torch.dtype
) -> str:
    """The gradient of a maximum over what the taps saw: each to the first that has it."""
    rank, lead, rest = len(shape), list(shape[: a.axis]), list(shape[a.axis + 1 :])
    largest = g.op("Max", *seen)
    shares: list[list[str]] = [[] for _ in range(a.stride)]
    for tap, saw in enumerate(seen):
        share = grad
        if tap + 1 < len(seen):
            first = g.op("GreaterOrEqual", saw, largest)
            share = g.op("Where", first, grad, g.scalar(0, dtype))
            grad = g.op("Sub", grad, share)
        ahead, place = a.shift(tap)
        end = a.groups - a.positions - ahead
        shares[place].append(_padded(g, share, rank, a.axis, ahead, end))
    # Where no tap looks, no gradient comes from.
    sums = [
        (g.op("Sum", *one) if len(one) > 1 else one[0])
        if one
        else g.zeros([*lead, a.groups, *rest], dtype)
        for one in shares
    ]
    if a.stride == 1:
        return sums[0]
    apart = g.target([*lead, a.groups, 1, *rest])
    joined = g.op("Concat", *[g.op("Reshape", one, apart) for one in sums], axis=a.axis + 1)
    joined = g.op("Reshape", joined, g.target([*lead, a.groups * a.stride, *rest]))
    return _padded(g, joined, rank, a.axis, 0, a.size - a.groups * a.stride)


def _axis_by_axis(g: Graph, grad: Value, x: Value, axes: Sequence[_Axis]) -> str:
    stages = []
    name, shape = x.name, list(x.shape)
    for a in reversed(axes):
        if (a.kernel, a.stride, a.padding) != (1, 1, 0):
            seen = _seen(g, name, shape, a, x.dtype)
            stages.append((seen, list(shape), a))
            name = g.op("Max", *seen) if len(seen) > 1 else seen[0]
            shape[a.axis] = a.positions
    back = grad.name
    for seen, before, a in reversed(stages):
        back = _to_first(g, back, seen, before, a, x.dtype)
    return back


@lowers(
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default
)
def max_pool_backward(g: Graph, grad: Value, x: Value, *, settings: Mapping[str, Any]) -> str:
    w = _windows(max(len(settings["kernel_size"]), 2), settings)
    rank, window, steps, begins, spread = w.rank, w.window, w.steps, w.begins, w.spread
    sizes = [fixed(size) for size in x.shape[-rank:]]
    positions = [fixed(size) for size in grad.shape[-rank:]]
    known = [size for size in (*sizes, *positions) if size is not None]
    large = math.prod(known[:rank]) > SMALL_IMAGE or set(steps) == {1}
    taps = len(known) == 2 * rank and max(window) <= _MOST_TAPS
    # Comparisons would take the padding for the first of a window of -inf alone.
    if taps and large and not (any(begins) and _may_hold_least(g, x.name)):
        numbers = zip(known[:rank], known[rank:], window, steps, begins, spread, strict=True)
        axes = [_Axis(x.rank - rank + i, *each) for i, each in enumerate(numbers)]
        return _axis_by_axis(g, grad, x, axes)
    apart = all(s >= d * (k - 1) + 1 for s, d, k in zip(steps, spread, window, strict=True))
    return _max_pool_gradient(g, grad, x, settings["indices"], apart)


# Where windows of an adaptive maximum have unequal sizes and overlap, each one's places are listed.


def _listed_places(sizes: Sequence[int], wanted: Sequence[int]) -> np.ndarray[Any, Any]:
    """[windows, most places]: each window's places in a plane, in order; the first one repeated."""
    windows: list[list[int]] = [[0]]
    for size, want in zip(sizes, wanted, strict=True):
        along = [range(i * size // want, -(-(i + 1) * size // want)) for i in range(want)]
        windows = [
            [p * size + q for p in window for q in each] for window in windows for each in along
        ]
    most = max(map(len, windows))
    return np.array([window + window[:1] * (most - len(window)) for window in windows])


@lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(g: Graph, out: Any, x: Value, sizes: Sequence[int]) -> tuple[str, str]:
    rank = len(sizes)
    window = even_window(x, out[0], rank)
    if window is not None:
        return max_pool_with_indices(g, out, x, settings={"kernel_size": window})
    inner = fixed_sizes(x.shape[-rank:], "aten.adaptive_max_pool")
    places = _listed_places(inner, fixed_sizes(out[0].shape[-rank:], "aten.adaptive_max_pool"))
    lead = list(x.shape[:-rank])
    planes = g.op("Reshape", x, g.target([*lead, math.prod(inner)]))
    seen = g.op("Gather", planes, g.constant(places), axis=-1)
    # The first of equal ones, as in torch.
    best = g.op("ArgMax", seen, axis=-1, keepdims=0)
    listed = np.arange(len(places), dtype=np.int64) * places.shape[1]
    indices = g.op("Gather", g.constant(places.reshape(-1)), g.op("Add", best, g.constant(listed)))
    values = g.op("ReduceMax", seen, g.ints([-1]), keepdims=0)
    return g.reshape(values, out[0].shape), g.reshape(indices, out[1].shape)


def _adaptive_max_gradient(g: Graph, grad: Value, x: Value, indices: Value, rank: int) -> str:
    if even_window(x, grad, rank) is not None:
        return _max_pool_gradient(g, grad, x, indices, True)
    lead = list(x.shape[:-rank])
    plane = math.prod(fixed_sizes(x.shape[-rank:], "aten.adaptive_max_pool"))
    windows = g.target(
        [*lead, math.prod(fixed_sizes(grad.shape[-rank:], "aten.adaptive_max_pool"))]
    )
    added = g.op(
        "ScatterElements",
        g.zeros([*lead, plane], x.dtype),
        g.op("Reshape", indices, windows),
        g.op("Reshape", grad, windows),
        axis=-1,
        reduction="add",
    )
    return g.reshape(added, x.shape)


@lowers(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(g: Graph, grad: Value, x: Value, indices: Value) -> str:
    return _adaptive_max_gradient(g, grad, x, indices, 2)


@lowers(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(g: Graph, grad: Value, x: Value, indices: Value) -> str:
    return _adaptive_max_gradient(g, grad, x, indices, 3)
