"""Convolutions, plain and transposed, each in the form that is fastest for its fixed sizes.

Two forms of the same sums: ONNX's ``Conv`` and ``ConvTranspose``, and columns with one matrix
product over the whole batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from export.errors import ExportError
from export.lowering.channels import SMALL_IMAGE, exchanged, held_first
from export.lowering.graph import NUMPY_DTYPE, Graph, Value
from export.lowering.reductions import reduce
from export.lowering.registry import lowers
from export.symbols import Dim, fixed

# How a convolution's kernel slides over its input.


@dataclass(frozen=True)
class Window:
    """How a kernel slides over ``sizes`` input positions to give ``positions`` output positions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    sizes: tuple[Dim, ...]
    positions: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    @property
    def taps(self) -> int:
        """Number of weights for a pair of channels."""
        return math.prod(self.kernel)

    def attributes(self) -> dict[str, Any]:
        """As ``Conv`` and ``ConvTranspose`` want them."""
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.stride),
            "pads": [*self.padding, *self.padding],
            "dilations": list(self.dilation),
            "group": self.groups,
        }

    def fixed_positions(self) -> list[int] | None:
        """The output positions along each axis, or None where one depends on a named axis."""
        sizes = [fixed(size) for size in (*self.positions, *self.sizes)]
        if any(size is None for size in sizes):
            return None
        return [int(size) for size in sizes[: self.rank] if size is not None]

    def fixed_sizes(self) -> list[int]:
        """The input's positions along each axis, where ``fixed_positions`` has found them fixed."""
        return [int(size) for size in map(fixed, self.sizes) if size is not None]


def window_between(
    x_sizes: Sequence[Dim], y_sizes: Sequence[Dim], weight: Value, settings: Mapping[str, Any]
) -> Window:
    """The window that leads from ``x_sizes`` (the larger side) to ``y_sizes``.

    ``settings``: of ``aten.convolution``, by its names.
    """
    kernel = [fixed(size) for size in weight.shape[2:]]
    if any(size is None for size in kernel):
        raise ExportError(
            "a kernel whose size depends on a named axis",
            operator="aten.convolution",
            instead="a weight whose named axes are channels",
        )
    rank = len(kernel)

    def each(name: str) -> tuple[int, ...]:
        listed = [int(value) for value in settings[name]]
        return tuple(listed * rank if len(listed) == 1 else listed)

    return Window(
        tuple(int(size) for size in kernel if size is not None),
        each("stride"),
        each("padding"),
        each("dilation"),
        settings["groups"],
        tuple(x_sizes),
        tuple(y_sizes),
    )


# Columns: what each tap of a kernel sees, laid out for one matrix product over the whole batch.

# onnxruntime multiplies image by image. With few positions an image's product is so thin that
# the time goes into reading the weights again for each image; one product over the batch reads
# them once: 5.8 ms and 1.7 at 2 x 2 positions and 512 channels, batch 8. It also multiplies group
# by group: 411 us and 172 for 55 groups of 8 channels there, and 451 and 316 for the weight's
# gradient of 26 such groups at 4 x 4.


class Few(NamedTuple):
    """The most positions at which one product over the batch pays."""

    many_weights: int
    several_groups: int


FEW_FORWARD, FEW_OF_INPUT, FEW_OF_WEIGHT = Few(9, 4), Few(16, 4), Few(16, 16)
_MANY_WEIGHTS = 65536
# So few that it is faster with few weights, too: 171 us and 73 for [8, 128, 2, 2] to 32 channels.
_FEWEST_POSITIONS = 4
_LARGEST_SELECTION = 65536
_COL2IM_FROM = 10


def is_thin(w: Window, weight: Value, few: Few) -> bool:
    """Whether one product over the batch beats a product an image: few positions, many weights."""
    positions = w.fixed_positions()
    sizes = [fixed(size) for size in weight.shape]
    if positions is None or any(size is None for size in sizes):
        return False
    count, weights = math.prod(positions), math.prod(size for size in sizes if size is not None)
    if w.groups > 1:
        limit = few.several_groups
    elif is_point(w):
        # One tap sees the input as it is: nothing is laid out before.
        return count <= SMALL_IMAGE
    else:
        limit = few.many_weights if weights >= _MANY_WEIGHTS else _FEWEST_POSITIONS
    selection = math.prod(w.fixed_sizes()) * count * w.taps
    return count <= limit and selection <= _LARGEST_SELECTION


def weight_size(value: Value, axis: int) -> int:
    """A size that is known to be fixed."""
    number = fixed(value.shape[axis])
    assert number is not None, "callers check that the weight's sizes are fixed"
    return number


def channels_second(g: Graph, product: str, channels: int, positions: Sequence[Dim]) -> str:
    """A product's [c, n * positions] as [n, c, positions]."""
    spatial = g.op("Reshape", product, g.target([channels, -1, *positions]))
    return exchanged(g, spatial, len(positions) + 2)


def joined(g: Graph, parts: list[str], axis: int) -> str:
    """One value of the parts, one after another along the axis."""
    return parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=axis)


def places_of(w: Window, axis: int) -> np.ndarray[Any, Any]:
    """[taps, sizes, positions] along one axis: where a tap leads from a size to a position."""
    size, positions = w.fixed_sizes()[axis], (w.fixed_positions() or [])[axis]
    tap, place, position = np.ogrid[: w.kernel[axis], :size, :positions]
    found: np.ndarray[Any, Any] = (
        position * w.stride[axis] + tap * w.dilation[axis] - w.padding[axis] == place
    )
    return found


def with_axis(before: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The places along several axes and along the ones before them, as along one axis."""
    joint = before[:, None, :, None, :, None] & places[None, :, None, :, None, :]
    sizes = [a * b for a, b in zip(before.shape, places.shape, strict=True)]
    found: np.ndarray[Any, Any] = joint.reshape(sizes)
    return found


def is_point(w: Window) -> bool:
    """Whether the one tap sees the input as it is."""
    return w.taps == 1 and set(w.stride) == {1} and not any(w.padding)


def _selection(w: Window, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """[sizes, positions, taps]: 1 where a tap leads from one of an image's sizes to a position."""
    places = functools.reduce(with_axis, [places_of(w, axis) for axis in range(w.rank)])
    return places.transpose(1, 2, 0).astype(NUMPY_DTYPE[dtype])


def _grouped(w: Window, *sizes: int) -> list[int]:
    """The sizes behind one for the groups, where there are several."""
    return [w.groups, *sizes] if w.groups > 1 else list(sizes)


def columns_of(g: Graph, x: Value, w: Window) -> tuple[str, bool]:
    """[groups, c * taps, n * positions], rows in the order of the weight's; c of one group.

    The first axis is left out where there is one group. True where the other two are exchanged.
    What the taps see of an image of few positions is its product with a matrix of zeros and ones:
    a third of the time of a Slice a tap.
    """
    channels = weight_size(x, 1) // w.groups
    if is_point(w):
        columns = g.op("Reshape", exchanged(g, x, x.rank), g.ints(_grouped(w, channels, -1)))
        return columns, False
    first = held_first(g, x)
    sizes, positions, taps = (table := _selection(w, x.dtype)).shape
    rows = g.op("Reshape", first or x, g.ints([-1, sizes]))
    seen = g.op("MatMul", rows, g.constant(table.reshape(sizes, -1)))
    k = len(_grouped(w))
    if first:
        lead, order = _grouped(w, channels, -1), [*range(k), k + 1, k + 2, k, k + 3]
    else:
        lead, order = [-1, *_grouped(w, channels)], [*range(1, k + 1), 0, k + 2, k + 1, k + 3]
    seen = g.op("Reshape", seen, g.ints([*lead, positions, taps]))
    seen = g.op("Transpose", seen, perm=order)
    return g.op("Reshape", seen, g.ints(_grouped(w, -1, channels * taps))), True


def _product(
    g: Graph, w: Window, a: str, b: str, *, trans_a: bool = False, trans_b: bool = False
) -> str:
    """a @ b of matrices, either one transposed before; group by group where there are several."""
    if w.groups == 1:
        return g.op("Gemm", a, b, transA=int(trans_a) or None, transB=int(trans_b) or None)
    a, b = (
        g.op("Transpose", each, perm=[0, 2, 1]) if turned else each
        for each, turned in ((a, trans_a), (b, trans_b))
    )
    return g.op("MatMul", a, b)


def _weight_rows(g: Graph, weight: Value, w: Window) -> str:
    """[groups, o, c * taps]; the first axis is left out where there is one group."""
    outputs = weight_size(weight, 0) // w.groups
    columns = weight_size(weight, 1) * w.taps
    return g.op("Reshape", weight, g.ints(_grouped(w, outputs, columns)))


def _output_rows(g: Graph, grad: Value, weight: Value, w: Window) -> str:
    """[groups, o, n * positions]; the first axis is left out where there is one group."""
    outputs = weight_size(weight, 0) // w.groups
    return g.op("Reshape", exchanged(g, grad, grad.rank), g.ints(_grouped(w, outputs, -1)))


# Depthwise convolutions: a channel's weights spread over a matrix, and a batch of products.
#
# onnxruntime calls its matrix product once an image and channel, and the cost is the call. A row
# of the image times the Toeplitz matrix [width, positions] of a row of the kernel is a row of the
# result, so that one batch of products a row of the kernel, with a channel each, makes all images.
# Small images take one matrix [height * width, positions] for the whole kernel. Microseconds with
# 3 x 3 weights, onnxruntime's Conv and this:
#
#     forward  [16, 960, 2, 2] 2907, 176; [16, 576, 4, 4] 2001, 198; [32, 64, 25, 5] 1679, 659;
#              [16, 144, 16, 16] 1672, 1652; [16, 64, 24, 24] 1408, 2062
#     weight's gradient  [32, 64, 25, 5] 3614, 813; [16, 144, 16, 16] 7970, 1926;
#              [16, 32, 32, 32] 6995, 2233; [16, 96, 32, 32] with stride 2 6399, 3679
_WHOLE_MATRIX = 4096
_WIDEST_ROW = 16
_WIDEST_ROW_OF_GRADIENT = 64


def _is_depthwise(w: Window, weight: Value, widest: int) -> bool:
    """Whether each channel has one kernel of its own, over rows of at most ``widest``."""
    if w.groups == 1 or fixed(weight.shape[1]) != 1 or fixed(weight.shape[0]) != w.groups:
        return False
    return w.fixed_positions() is not None and (
        _is_whole(w) or (w.rank == 2 and w.fixed_sizes()[-1] <= widest)
    )


def _is_whole(w: Window) -> bool:
    return math.prod(w.fixed_sizes()) * math.prod(w.fixed_positions() or ()) <= _WHOLE_MATRIX


@dataclass(frozen=True)
class _Toeplitz:
    """Rows of the image times matrices: [c, n * rows, width] @ [c, width, positions] a kernel row.

    ``places`` [taps of a kernel row, width, positions] is 1 where a tap leads from an input's
    place to an output's.
    """

    w: Window
    places: np.ndarray[Any, Any]

    @property
    def rows(self) -> int:
        """Rows of the kernel; 1 where the whole image is one row."""
        return self.w.taps // len(self.places)

    @property
    def whole(self) -> bool:
        """Whether the whole image is one row."""
        return len(self.places[0]) == math.prod(self.w.fixed_sizes())

    def matrices(self, g: Graph, weight: Value, *, back: bool = False) -> list[str]:
        """A matrix [c, width, positions] for each row of the kernel; transposed with ``back``."""
        places = self.places.swapaxes(1, 2) if back else self.places
        table = g.constant(places.reshape(len(places), -1).astype(NUMPY_DTYPE[weight.dtype]))
        taps = len(places)
        rows = g.op("Reshape", weight, g.ints([self.w.groups, self.rows, taps]))
        parts = [rows]
        if self.rows > 1:
            parts = list(g.multi("Split", rows, g.ints([1] * self.rows), outputs=self.rows, axis=1))
        shape = g.ints([self.w.groups, *places.shape[1:]])
        return [g.op("Reshape", g.op("MatMul", part, table), shape) for part in parts]

    def inputs(self, g: Graph, x: Value) -> list[str]:
        """What each row of the kernel sees of x [n, c, ...], as [c, n * rows, width]."""
        held = exchanged(g, x, x.rank)
        shape = g.ints([self.w.groups, -1, self.places.shape[1]])
        if self.whole:
            return [g.op("Reshape", held, shape)]
        pad, step, spread = self.w.padding[0], self.w.stride[0], self.w.dilation[0]
        if pad:
            held = g.op("Pad", held, g.ints([0, 0, pad, 0, 0, 0, pad, 0]), g.scalar(0, x.dtype))
        reach = ((self.w.fixed_positions() or [])[0] - 1) * step + 1
        return [
            g.op("Reshape", _rows(g, held, row * spread, reach, step), shape)
            for row in range(self.rows)
        ]

    def outputs(self, g: Graph, grad: Value) -> str:
        """A gradient of the output [n, c, ...], as [c, n * rows, positions]."""
        shape = g.ints([self.w.groups, -1, self.places.shape[2]])
        return g.op("Reshape", exchanged(g, grad, grad.rank), shape)

    def outputs_seen(self, g: Graph, grad: Value) -> list[str]:
        """The output's gradient at what each row of the kernel led from each row of the input."""
        if self.whole:
            return [self.outputs(g, grad)]
        held = exchanged(g, grad, grad.rank)
        height, (positions, width) = self.w.fixed_sizes()[0], self.w.fixed_positions() or []
        pad, step, spread = self.w.padding[0], self.w.stride[0], self.w.dilation[0]
        if step > 1:
            apart = g.op("Reshape", held, g.ints([self.w.groups, -1, positions, 1, width]))
            zeros = g.ints([0] * 8 + [step - 1, 0])
            apart = g.op("Pad", apart, zeros, g.scalar(0, grad.dtype))
            held = g.op("Reshape", apart, g.ints([self.w.groups, -1, positions * step, width]))
        begin, end = (self.rows - 1) * spread - pad, height + pad - positions * step
        around = g.ints([0, 0, begin, 0, 0, 0, end, 0])
        held = g.op("Pad", held, around, g.scalar(0, grad.dtype))
        shape = g.ints([self.w.groups, -1, width])
        return [
            g.op("Reshape", _rows(g, held, row * spread, height, 1), shape)
            for row in reversed(range(self.rows))
        ]


def _rows(g: Graph, x: str, begin: int, reach: int, step: int) -> str:
    return g.op("Slice", x, g.ints([begin]), g.ints([begin + reach]), g.ints([2]), g.ints([step]))


def _toeplitz(w: Window) -> _Toeplitz:
    axes = [places_of(w, axis) for axis in range(w.rank)]
    return _Toeplitz(w, functools.reduce(with_axis, axes) if _is_whole(w) else axes[-1])


def _summed(g: Graph, left: list[str], right: list[str]) -> str:
    products = [g.op("MatMul", a, b) for a, b in zip(left, right, strict=True)]
    return products[0] if len(products) == 1 else g.op("Sum", *products)


def _images(g: Graph, product: str, channels: int, sizes: Sequence[Dim]) -> str:
    """A product's [c, n * rows, width] as [n, c, ...]."""
    spatial = g.op("Reshape", product, g.target([channels, -1, *sizes]))
    return exchanged(g, spatial, len(sizes) + 2)


def depthwise(g: Graph, x: Value, weight: Value, bias: Value | None, w: Window) -> str:
    t = _toeplitz(w)
    product = _summed(g, t.inputs(g, x), t.matrices(g, weight))
    if bias is not None:
        product = g.op("Add", product, g.op("Reshape", bias, g.ints([-1, 1, 1])))
    return _images(g, product, w.groups, w.positions)


def depthwise_input(g: Graph, grad: Value, weight: Value, w: Window) -> str:
    """The gradient of a depthwise convolution's input."""
    t = _toeplitz(w)
    product = _summed(g, t.outputs_seen(g, grad), t.matrices(g, weight, back=True))
    return _images(g, product, w.groups, w.sizes)


def depthwise_weight(g: Graph, x: Value, grad: Value, weight: Value, w: Window) -> str:
    """The gradient of a depthwise convolution's weight: the matrices', summed tap by tap."""
    t = _toeplitz(w)
    outputs = t.outputs(g, grad)
    table = g.constant(t.places.reshape(len(t.places), -1).T.astype(NUMPY_DTYPE[x.dtype]))
    sums = []
    for rows in t.inputs(g, x):
        product = g.op("MatMul", g.op("Transpose", rows, perm=[0, 2, 1]), outputs)
        flat = g.op("Reshape", product, g.ints([w.groups, -1]))
        sums.append(g.op("MatMul", flat, table))
    return g.op("Reshape", joined(g, sums, 1), g.shape(weight.shape))


aten = torch.ops.aten


@lowers(aten.convolution.default)
def convolution(
    g: Graph, out: Any, x: Value, weight: Value, bias: Value | None, *, settings: Mapping[str, Any]
) -> str:
    if settings["transposed"]:
        w = window_between(out.shape[2:], x.shape[2:], weight, settings)
        extra = [int(value) for value in settings["output_padding"]]
        return transposed_convolution(
            g, x, weight, bias, w, extra * w.rank if len(extra) == 1 else extra
        )
    w = window_between(x.shape[2:], out.shape[2:], weight, settings)
    if _is_depthwise(w, weight, _WIDEST_ROW):
        return depthwise(g, x, weight, bias, w)
    if not is_thin(w, weight, FEW_FORWARD):
        return g.op("Conv", x, weight, bias, **w.attributes())
    return by_one_product(g, x, weight, bias, w)


def by_one_product(g: Graph, x: Value, weight: Value, bias: Value | None, w: Window) -> str:
    """weight [o, c * taps] @ columns [c * taps, n * positions]."""
    columns, turned = columns_of(g, x, w)
    product = _product(g, w, _weight_rows(g, weight, w), columns, trans_b=turned)
    if bias is not None:
        line = g.ints(_grouped(w, weight_size(weight, 0) // w.groups, 1))
        product = g.op("Add", product, g.op("Reshape", bias, line))
    return channels_second(g, product, weight_size(weight, 0), w.positions)


def transposed_convolution(
    g: Graph, x: Value, weight: Value, bias: Value | None, w: Window, extra: Sequence[int]
) -> str:
    """A transposed convolution with ``extra`` positions at each axis's end."""
    attributes = w.attributes()
    if all(value < stride for value, stride in zip(extra, w.stride, strict=True)):
        room = list(extra) if any(extra) else None
        return g.op("ConvTranspose", x, weight, bias, **attributes, output_padding=room)
    # onnxruntime refuses an output padding of a stride or more, which torch allows under a
    # larger dilation: first what the padding had cut off, then zeros that no tap reaches.
    ends = [max(p - value, 0) for p, value in zip(w.padding, extra, strict=True)]
    zeros = [max(value - p, 0) for p, value in zip(w.padding, extra, strict=True)]
    attributes["pads"] = [*w.padding, *ends]
    result = g.op("ConvTranspose", x, weight, **attributes)
    pads = g.ints([0] * (w.rank + 4) + zeros)
    result = g.op("Pad", result, pads, g.scalar(0, x.dtype))
    if bias is None:
        return result
    return g.op("Add", result, g.op("Reshape", bias, g.ints([-1] + [1] * w.rank)))


# The gradients of convolutions, each in the form that is fastest for its fixed sizes.
#
# Three forms of the same sums: ONNX's ``Conv`` and ``ConvTranspose``; columns with one matrix
# product over the whole batch; and, for the weight's gradient, a convolution in which batch and
# channels change places.

# From this many channels products whose innermost axis is the channels beat the exchanged
# convolution for the weight's gradient, by 1.9 to 3.3 times.
_MANY_CHANNELS = 16


@lowers(aten.convolution_backward.default)
def convolution_backward(
    g: Graph, grad: Value, x: Value, weight: Value, *, settings: Mapping[str, Any]
) -> tuple[str | None, ...]:
    transposed, wanted = settings["transposed"], settings["output_mask"]
    # A transposed convolution is the input gradient of a plain one, so its own gradients are
    # the plain one's with input and output exchanged.
    large, small = (grad, x) if transposed else (x, grad)
    w = window_between(large.shape[2:], small.shape[2:], weight, settings)
    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        grad_x = (
            _transposed_input(g, grad, weight, x, w) if transposed else _input(g, grad, weight, w)
        )
    if wanted[1]:
        grad_weight = _weight(g, large, small, weight, w)
    if wanted[2]:
        axes = [0, *range(2, grad.rank)]
        grad_bias = reduce(g, "ReduceSum", grad, axes, False, grad.dtype)
    return grad_x, grad_weight, grad_bias


def _transposed_input(g: Graph, grad: Value, weight: Value, x: Value, w: Window) -> str:
    result = g.op("Conv", grad, weight, **w.attributes())
    crops = [
        fixed(size - d * (k - 1) - 1 + 2 * p) for size, k, d, p in zip(
            w.sizes, w.kernel, w.dilation, w.padding, strict=True)
    ]  # fmt: skip
    have = [None if c is None else c // s + 1 for c, s in zip(crops, w.stride, strict=True)]
    if have == [fixed(size) for size in x.shape[2:]] and None not in have:
        return result
    # An output padding of a stride or more makes room for positions beyond the input's.
    axes = g.ints(range(2, x.rank))
    return g.op("Slice", result, g.ints([0] * w.rank), g.shape(x.shape[2:]), axes)


def _input(g: Graph, grad: Value, weight: Value, w: Window) -> str:
    """The gradient of the input [n, c, sizes]."""
    if _is_depthwise(w, weight, _WIDEST_ROW):
        return depthwise_input(g, grad, weight, w)
    if w.rank <= 2 and is_thin(w, weight, FEW_OF_INPUT):
        return input_by_one_product(g, grad, weight, w)
    if is_point(w) and w.groups == 1:
        # A plain convolution: 1.1 to 1.3 times as fast as ConvTranspose.
        return g.op("Conv", grad, exchanged(g, weight, weight.rank), kernel_shape=list(w.kernel))
    left_over = [
        fixed(size + 2 * p - d * (k - 1) - 1 - (y - 1) * s)
        for size, y, k, s, p, d in zip(
            w.sizes, w.positions, w.kernel, w.stride, w.padding, w.dilation, strict=True
        )
    ]
    if None not in left_over:
        extra = [value for value in left_over if value is not None]
        return transposed_convolution(g, grad, weight, None, w, extra)
    # Sizes along a named axis: the whole reach of the kernel, then cut or filled to the input's.
    attributes = {**w.attributes(), "pads": [0] * (2 * w.rank)}
    full = g.op("ConvTranspose", grad, weight, **attributes)
    ends = [
        size + p - ((y - 1) * s + d * (k - 1) + 1)
        for size, y, k, s, p, d in zip(
            w.sizes, w.positions, w.kernel, w.stride, w.padding, w.dilation, strict=True
        )
    ]
    pads = g.shape([0, 0, *(-p for p in w.padding), 0, 0, *ends])
    return g.op("Pad", full, pads, g.scalar(0, grad.dtype))


def input_by_one_product(g: Graph, grad: Value, weight: Value, w: Window) -> str:
    """grad^T [n * positions, o] @ weight [o, c * taps], then each tap's share to its place."""
    channels = weight_size(weight, 1)
    rows, columns = _weight_rows(g, weight, w), _output_rows(g, grad, weight, w)
    if is_point(w):
        product = _product(g, w, rows, columns, trans_a=True)
        return channels_second(g, product, channels * w.groups, w.positions)
    table = _selection(w, grad.dtype)
    sizes, positions, taps = table.shape
    # As narrow as the batch: onnxruntime would turn the whole weight to have it first.
    product = _product(g, w, columns, rows, trans_a=True)
    shares = g.op("Reshape", product, g.ints(_grouped(w, -1, positions, channels, taps)))
    if positions < _COL2IM_FROM or w.groups > 1:
        k = len(_grouped(w))
        shares = g.op("Transpose", shares, perm=[*range(k), k + 2, k, k + 1, k + 3])
        shares = g.op("Reshape", shares, g.ints([-1, positions * taps]))
        summed = g.op("MatMul", shares, g.constant(table.reshape(sizes, -1).T))
        return channels_second(g, summed, channels * w.groups, w.sizes)
    shares = g.op("Transpose", shares, perm=[0, 2, 3, 1])
    # onnxruntime's Col2Im is wrong along a single axis that is dilated, so that one gets a second.
    lead = 2 - w.rank
    result = g.op(
        "Col2Im",
        g.op("Reshape", shares, g.ints([-1, channels * taps, positions])),
        g.shape([1] * lead + list(w.sizes)),
        g.ints([1] * lead + list(w.kernel)),
        strides=[1] * lead + list(w.stride),
        pads=([0] * lead + list(w.padding)) * 2,
        dilations=[1] * lead + list(w.dilation),
    )
    return g.op("Squeeze", result, g.ints([2])) if lead else result


def _weight(g: Graph, x: Value, grad: Value, weight: Value, w: Window) -> str:
    """The gradient of the weight [o, c / groups, kernel] for input x and output gradient grad."""
    if _is_depthwise(w, weight, _WIDEST_ROW_OF_GRADIENT):
        return depthwise_weight(g, x, grad, weight, w)
    if is_thin(w, weight, FEW_OF_WEIGHT):
        return weight_by_one_product(g, x, grad, weight, w)
    channels = fixed(x.shape[1]) or 0
    known = fixed(grad.shape[1]) is not None and w.fixed_positions() is not None
    if w.groups == 1 and known and channels >= _MANY_CHANNELS:
        return weight_tap_by_tap(g, x, grad, weight, w)
    return weight_by_exchange(g, x, grad, weight, w)


def weight_by_one_product(g: Graph, x: Value, grad: Value, weight: Value, w: Window) -> str:
    """grad [o, n * positions] @ columns^T [n * positions, c * taps]."""
    columns, turned = columns_of(g, x, w)
    product = _product(g, w, _output_rows(g, grad, weight, w), columns, trans_b=not turned)
    return g.op("Reshape", product, g.shape(weight.shape))


def weight_tap_by_tap(g: Graph, x: Value, grad: Value, weight: Value, w: Window) -> str:
    """grad [o, n * positions] @ [n * positions, c] for each tap: channels stay contiguous.

    Nothing is laid out side by side before: [4, 32, 64, 64] with 3 x 3 weights 5.2 ms in place of
    9.8, [8, 64, 16, 16] 2.6 in place of 3.8.
    """
    outputs, channels = weight_size(weight, 0), weight_size(weight, 1)
    if is_point(w):
        # Many positions: a product an image moves nothing before it.
        count = math.prod(w.fixed_positions() or ())
        grads = g.op("Reshape", grad, g.ints([-1, outputs, count]))
        images = g.op("Reshape", x, g.ints([-1, channels, count]))
        each = g.op("MatMul", grads, g.op("Transpose", images, perm=[0, 2, 1]))
        total = g.op("ReduceSum", each, g.ints([0]), keepdims=0)
        return g.op("Reshape", total, g.shape(weight.shape))
    rows = g.op("Reshape", exchanged(g, grad, grad.rank), g.ints([outputs, -1]))
    products = [
        g.op("Gemm", rows, g.op("Reshape", tap, g.ints([-1, channels])))
        for tap in _taps_of(g, x, w)
    ]
    each = joined(g, products, 1)
    if w.taps > 1:
        each = g.op("Reshape", each, g.ints([outputs, w.taps, channels]))
        each = g.op("Transpose", each, perm=[0, 2, 1])
    return g.op("Reshape", each, g.shape(weight.shape))


def _taps_of(g: Graph, x: Value, w: Window) -> list[str]:
    """The input as each tap of the kernel sees it, channels last: [n, positions, c]."""
    last = g.op("Transpose", x, perm=[0, *range(2, w.rank + 2), 1])
    if any(w.padding):
        around = [0, *w.padding, 0]
        last = g.op("Pad", last, g.ints(around * 2), g.scalar(0, x.dtype))
    axes = g.ints(range(1, w.rank + 1))
    reach = [(y - 1) * s + 1 for y, s in zip(w.fixed_positions() or (), w.stride, strict=True)]
    parts = []
    for tap in np.ndindex(*w.kernel):
        begins = [index * d for index, d in zip(tap, w.dilation, strict=True)]
        ends = [begin + length for begin, length in zip(begins, reach, strict=True)]
        parts.append(g.op("Slice", last, g.ints(begins), g.ints(ends), axes, g.ints(w.stride)))
    return parts


def weight_by_exchange(g: Graph, x: Value, grad: Value, weight: Value, w: Window) -> str:
    """One convolution with batch and channels exchanged, and stride and dilation too.

    x [n, groups * c, ...] becomes [c, groups * n, ...], the gradient [groups * o, n, ...] is
    the kernel; the result [c, groups * o, kernel] may have room beyond the kernel, cut off.
    """
    channels = weight.shape[1]
    if w.groups == 1:
        moved = exchanged(g, x, x.rank)
    else:
        batch = x.shape[0]
        spatial = x.shape[2:]
        split = g.op("Reshape", x, g.target([batch, w.groups, channels, *spatial]))
        moved = g.op("Transpose", split, perm=[2, 1, 0, *range(3, x.rank + 1)])
        moved = g.op("Reshape", moved, g.target([channels, batch * w.groups, *spatial]))
    result = g.op(
        "Conv",
        moved,
        exchanged(g, grad, grad.rank),
        strides=list(w.dilation),
        pads=[*w.padding, *w.padding],
        dilations=list(w.stride),
        group=w.groups,
    )
    room = [
        fixed(size + 2 * p - s * (y - 1) - 1)
        for size, y, s, p in zip(w.sizes, w.positions, w.stride, w.padding, strict=True)
    ]
    have = [None if r is None else r // d + 1 for r, d in zip(room, w.dilation, strict=True)]
    if have != list(w.kernel):
        axes = g.ints(range(2, w.rank + 2))
        result = g.op("Slice", result, g.ints([0] * w.rank), g.ints(w.kernel), axes)
    return exchanged(g, result, w.rank + 2)
