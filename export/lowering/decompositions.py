"""Operators broken into simpler ones: torch's own decompositions, and those that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from export.insides import (
    core_aten_decompositions,
    get_decompositions,
    get_proxy_mode,
    get_proxy_slot,
)
from export.lowering import registry

aten = torch.ops.aten

# Broken up beside what torch's core set is.
_MORE = (
    aten.native_batch_norm,
    aten.native_group_norm,
    # onnxruntime's LayerNormalization crashes without a bias, and loses digits on data far from 0.
    aten.native_layer_norm,
    aten.elu,
    aten.addmv,
    aten.leaky_relu,
    aten.linalg_vector_norm,
    aten.var_mean,
    aten.var,
    aten.std,
    aten._euclidean_dist,
    aten.upsample_nearest2d,
    aten.cumprod,
    aten.rrelu_with_noise_backward,
)


def _weight_norm_backward(
    grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Gradients of v and g in w = v g / |v| (Salimans and Kingma 2016, equation 3)."""
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    along = (grad * v).sum(axes, keepdim=True) / norms
    return (g / norms) * (grad - v * (along / norms)), along


# A mask as the numbers of its true places. How many there are is known at run time; torch calls
# such a size u0, u1, ..., and what is computed from it follows.

Indices = list[Tensor | None]


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


class _EqualNodes:
    """Which nodes of a graph that is being recorded hold equal values."""

    def __init__(self, graph: fx.Graph) -> None:
        self._last: fx.Node = graph._root
        self._writes = 0
        self._first: dict[fx.Node, fx.Node] = {}
        self._made: dict[Hashable, fx.Node] = {}
        self.places: dict[fx.Node, list[Tensor]] = {}

    def first(self, node: fx.Node) -> fx.Node:
        """The first node that is made as this one is, of equal values."""
        while node not in self._first:
            self._last = self._last.next
            self._first[self._last] = self._equal(self._last)
        return self._first[node]

    def _equal(self, node: fx.Node) -> fx.Node:
        schema = getattr(node.target, "_schema", None)
        # Behind a write into memory the same call may give something else.
        self._writes += schema is not None and schema.is_mutable
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt):
            return self._made.setdefault(size.node.expr, node)
        tags = getattr(node.target, "tags", ())
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in tags:
            return node
        arguments = fx.map_arg((node.args, dict(node.kwargs)), self._first.__getitem__)
        return self._made.setdefault((node.target, repr(arguments), self._writes), node)


_RECORDED: WeakKeyDictionary[fx.Graph, _EqualNodes] = WeakKeyDictionary()


def _true_places(mask: Tensor) -> list[Tensor]:
    """The numbers of a mask's true places, axis by axis: the same tensors of equal masks.

    Two selections by one mask then have one size, also where the mask is made twice.
    """
    mode = get_proxy_mode()
    held = None if mode is None else get_proxy_slot(mask, mode.tracer, None)
    if mode is None or held is None:
        return list(aten.nonzero(mask).unbind(1))
    graph = mode.tracer.graph
    equal = _RECORDED.setdefault(graph, _EqualNodes(graph))
    node = equal.first(held.proxy.node)
    if node not in equal.places:
        equal.places[node] = list(aten.nonzero(mask).unbind(1))
    return equal.places[node]


def _numbered(indices: Indices) -> Indices:
    numbered: Indices = []
    for index in indices:
        if index is not None and _is_mask(index):
            numbered += _true_places(index)
        else:
            numbered.append(index)
    return numbered


def _index(a: Tensor, indices: Indices) -> Tensor:
    if not any(map(_is_mask, indices)):
        return NotImplemented  # type: ignore[no-any-return]
    found: Tensor = aten.index(a, _numbered(indices))
    return found


def _index_put(a: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> Tensor:
    if not any(map(_is_mask, indices)):
        return NotImplemented  # type: ignore[no-any-return]
    masks = [index for index in indices if index is not None]
    if len(masks) == 1 and values.dim() == 0 and not accumulate:
        after = a.dim() - len(indices) + 1 - masks[0].dim()
        mask = masks[0].reshape([*masks[0].shape, *[1] * after])
        return torch.where(mask, values, a)
    numbered = _numbered(indices)
    if accumulate and all(map(_is_mask, masks)) and len(masks) == 1:
        # No place twice: no sum that two threads could race for.
        values = values + aten.index(a, numbered)
    found: Tensor = aten.index_put(a, numbered, values, accumulate and len(masks) > 1)
    return found


def _index_put_in_place(
    a: Tensor, indices: Indices, values: Tensor, accumulate: bool = False
) -> Tensor:
    found = _index_put(a, indices, values, accumulate)
    return found if found is NotImplemented else a.copy_(found)


def _broadcast_in_dim(a: Tensor, shape: Sequence[Any], places: Sequence[int]) -> Tensor:
    """``a`` with its axes at ``places`` of the result, repeated along all others.

    torch's own says that it may be a view, which a recording without writes does not take.
    """
    between: list[Any] = [1] * len(shape)
    for axis, place in enumerate(places):
        between[place] = a.shape[axis]
    return a.reshape(between).expand(shape)


def _replication_pad_backward(grad: Tensor, a: Tensor, padding: Sequence[Any]) -> Tensor:
    """Each axis by itself: what was padded goes to the edge that it repeats."""
    for place in range(0, len(padding), 2):
        axis, before, after = a.dim() - 1 - place // 2, padding[place], padding[place + 1]
        size = a.shape[axis]
        if before < 0 or after < 0:
            return NotImplemented  # type: ignore[no-any-return]
        inner = grad.narrow(axis, before, size)
        for amount, start, around in (
            (before, 0, (0, size - 1)),
            (after, before + size, (size - 1, 0)),
        ):
            edge = grad.narrow(axis, start, amount).sum(axis, keepdim=True)
            inner = inner + aten.constant_pad_nd(edge, [0, 0] * (place // 2) + list(around))
        grad = inner
    return grad


def _addbmm(a: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    result: Tensor = beta * a + alpha * (x @ y).sum(0)
    return result


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Two products, where torch's own multiplies all three element by element."""
    axes = range(a.dim() + len(expand1))
    of_a, of_b, of_c, of_result = (
        {axis for axis in axes if axis not in absent}
        for absent in (expand1, expand2, expand3, sumdim)
    )

    def product(x: Tensor, of_x: set[int], y: Tensor, of_y: set[int], wanted: set[int]) -> Tensor:
        named = [
            "".join(chr(ord("a") + axis) for axis in sorted(of)) for of in (of_x, of_y, wanted)
        ]
        return torch.einsum("{},{}->{}".format(*named), x, y)

    between = (of_a | of_b) & (of_c | of_result)
    return product(product(a, of_a, b, of_b, between), between, c, of_c, of_result)


def _adaptive_avg_pool3d(a: Tensor, output_size: Sequence[Any]) -> Tensor:
    """Over planes, and then over the depths of their places."""
    depth, *plane = output_size
    layers = aten._adaptive_avg_pool2d(a.flatten(0, -4), plane)
    result: Tensor = aten._adaptive_avg_pool2d(layers.flatten(-2), [depth, plane[0] * plane[1]])
    return result.reshape([*a.shape[:-3], *output_size])


def _adaptive_avg_pool3d_backward(grad: Tensor, a: Tensor) -> Tensor:
    layers = grad.flatten(0, -4)
    planes = layers.new_empty([layers.shape[0], a.shape[-3], *grad.shape[-2:]])
    deep = aten._adaptive_avg_pool2d_backward(layers.flatten(-2), planes.flatten(-2))
    whole = a.flatten(0, -4)
    result: Tensor = aten._adaptive_avg_pool2d_backward(deep.reshape(planes.shape), whole)
    return result.reshape(a.shape)


def _prims_sum(a: Tensor, dims: Any, *, output_dtype: Any = None) -> Tensor:
    return aten.sum(a, dims, dtype=output_dtype) if dims else a.clone()


def _diagonal_backward(
    grad: Tensor, sizes: Sequence[Any], offset: int, dim1: int, dim2: int
) -> Tensor:
    """The gradient on the diagonal of zeros."""
    zero = torch.zeros((), dtype=grad.dtype)
    return _diagonal_scatter(zero.expand(list(sizes)), grad, offset, dim1, dim2)


def _diagonal_scatter(
    a: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """``a`` with ``source`` on its diagonal, by a mask of the two axes."""
    sizes = a.shape
    if source.shape[-1] == 0:
        return a.clone()
    first, second = dim1 % len(sizes), dim2 % len(sizes)
    rest = [axis for axis in range(len(sizes)) if axis not in (first, second)]
    rows, columns = torch.arange(sizes[first]).unsqueeze(1), torch.arange(sizes[second])
    # The diagonal's element number at each place: its row, or its column below the main one.
    number = (rows if offset >= 0 else columns).expand(sizes[first], sizes[second])
    last = source.shape[-1] - 1
    spread = source[..., number.clamp(min=0, max=last)]
    order = [*rest, first, second]
    spread = torch.where(columns - rows == offset, spread, a.permute(order))
    return spread.permute([order.index(axis) for axis in range(len(sizes))])


def _slice_scatter(
    a: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Tensor:
    """``a`` with ``source`` at every ``step``th place along an axis."""
    if step == 1:
        return NotImplemented  # type: ignore[no-any-return]
    places = torch.arange(a.shape[dim])[start:end:step]
    written: Tensor = aten.index_put(a, [*[None] * (dim % a.dim()), places], source)
    return written


registry.decomposes(
    {
        aten.index.Tensor: _index,
        aten.index_put.default: _index_put,
        aten.index_put_.default: _index_put_in_place,
        aten._adaptive_avg_pool3d.default: _adaptive_avg_pool3d,
        aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_pool3d_backward,
        aten.addbmm.default: _addbmm,
        aten._trilinear.default: _trilinear,
        aten.diagonal_backward.default: _diagonal_backward,
        aten.diagonal_scatter.default: _diagonal_scatter,
        aten.slice_scatter.default: _slice_scatter,
        torch.ops.prims.broadcast_in_dim.default: _broadcast_in_dim,
        torch.ops.prims.sum.default: _prims_sum,
        torch.ops.prims.div.default: aten.div.Tensor,
        **{
            getattr(aten, f"replication_pad{rank}d_backward").default: _replication_pad_backward
            for rank in (1, 2, 3)
        },
    }
)


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator to decomposition; what has a lowering of its own is kept whole."""
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions().items())
    table.update(get_decompositions(_MORE))
    table[aten._weight_norm_interface_backward.default] = _weight_norm_backward
    simpler = {op: function for op, function in table.items() if registry.find(op) is None}
    return {**simpler, **registry.decompositions()}
