"""Axes counted from the end, in every lowering that takes an axis: as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from export.lowering import registry
from tests.export.recorded import assert_as_torch

aten = torch.ops.aten
prims = torch.ops.prims

X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
NAMES = {"dim", "dims", "dim0", "dim1", "dim2", "dimension", "start_dim"}


def _index(x: Tensor, d: int) -> Tensor:
    return torch.arange(x.shape[d]).flip(0)


def _places(x: Tensor) -> Tensor:
    """For each element the number of its place along the axis, turned round: any axis will do."""
    return torch.zeros(x.shape, dtype=torch.int64) + torch.arange(2).repeat(3)[: x.shape[-1]]


CALLS: dict[Any, Callable[[Tensor, int], Any]] = {
    aten.unsqueeze.default: lambda x, d: aten.unsqueeze(x, d),
    aten.squeeze.dim: lambda x, d: aten.squeeze(x.narrow(d, 0, 1), d),
    aten.squeeze.dims: lambda x, d: aten.squeeze(x.narrow(d, 0, 1), [d]),
    aten.flatten.using_ints: lambda x, d: aten.flatten(x, d, -1),
    aten.permute.default: lambda x, d: aten.permute(x, [d, (d + 1) % -3, (d + 2) % -3]),
    aten.transpose.int: lambda x, d: aten.transpose(x, d, 0),
    aten.cat.default: lambda x, d: aten.cat([x, 2 * x], d),
    aten.stack.default: lambda x, d: aten.stack([x, 2 * x], d),
    aten.diagonal.default: lambda x, d: aten.diagonal(x, 0, d, (d - 1) % -3),
    aten.unfold.default: lambda x, d: aten.unfold(x, d, 2, 1),
    aten.index_select.default: lambda x, d: aten.index_select(x, d, _index(x, d)),
    aten.gather.default: lambda x, d: aten.gather(x, d, _places(x)),
    aten.scatter_add.default: lambda x, d: aten.scatter_add(x, d, _places(x), 2 * x),
    aten.scatter_reduce.two: lambda x, d: aten.scatter_reduce(x, d, _places(x), 2 * x, "sum"),
    aten.scatter.src: lambda x, d: aten.scatter(x, d, _places(x)[:1, :1, :2], 2 * x),
    aten.scatter.value: lambda x, d: aten.scatter(x, d, _places(x), 2.0),
    aten.index_add.default: lambda x, d: aten.index_add(x, d, _index(x, d), 2 * x),
    aten.index_reduce.default: lambda x, d: aten.index_reduce(x, d, _index(x, d), 2 * x, "amax"),
    aten.index_copy.default: lambda x, d: aten.index_copy(x, d, _index(x, d), 2 * x),
    aten.index_fill.int_Scalar: lambda x, d: aten.index_fill(x, d, _index(x, d)[:2], 3.0),
    aten.index_fill.int_Tensor: lambda x, d: aten.index_fill(x, d, _index(x, d)[:2], x[0, 0, 0]),
    aten.unique_dim.default: lambda x, d: aten.unique_dim((x > 0.5).long(), d, True, True, True),
    aten.slice.Tensor: lambda x, d: aten.slice(x, d, 1, 3),
    aten.flip.default: lambda x, d: aten.flip(x, [d]),
    aten.select.int: lambda x, d: aten.select(x, d, -2),
    aten.split_with_sizes.default: lambda x, d: aten.split_with_sizes(x, [1, x.shape[d] - 1], d),
    aten.split.Tensor: lambda x, d: aten.split(x, 2, d),
    aten.unbind.int: lambda x, d: aten.unbind(x, d),
    aten.slice_backward.default: lambda x, d: aten.slice_backward(
        x, [s + (i == d % 3) for i, s in enumerate(x.shape)], d, 1, x.shape[d] + 1, 1
    ),
    aten.select_backward.default: lambda x, d: aten.select_backward(
        x.select(d, 0), list(x.shape), d, -2
    ),
    aten.slice_scatter.default: lambda x, d: aten.slice_scatter(x, 2 * x.narrow(d, 0, 2), d, 1, 3),
    aten.select_scatter.default: lambda x, d: aten.select_scatter(x, x.select(d, 0), d, -2),
    aten.sum.dim_IntList: lambda x, d: aten.sum(x, [d]),
    aten.mean.dim: lambda x, d: aten.mean(x, [d]),
    aten.amax.default: lambda x, d: aten.amax(x, [d]),
    aten.amin.default: lambda x, d: aten.amin(x, [d]),
    aten.prod.dim_int: lambda x, d: aten.prod(x, d),
    # Their axes are from 0 in what torch itself records.
    prims.prod.default: lambda x, d: prims.prod(x, [d % 3]),
    prims.var.default: lambda x, d: prims.var(x, [d % 3], 1.0),
    aten.logsumexp.default: lambda x, d: aten.logsumexp(x, [d]),
    aten.any.dim: lambda x, d: aten.any(x > 0, d),
    aten.any.dims: lambda x, d: aten.any(x > 0, [d]),
    aten.all.dim: lambda x, d: aten.all(x > 0, d),
    aten.all.dims: lambda x, d: aten.all(x > 0, [d]),
    aten.argmax.default: lambda x, d: aten.argmax(x, d),
    aten.argmin.default: lambda x, d: aten.argmin(x, d),
    aten.max.dim: lambda x, d: aten.max(x, d),
    aten.min.dim: lambda x, d: aten.min(x, d),
    aten.topk.default: lambda x, d: aten.topk(x, 2, d),
    aten.sort.default: lambda x, d: aten.sort(x, d),
    aten.sort.stable: lambda x, d: aten.sort(x, stable=True, dim=d),
    aten.cumsum.default: lambda x, d: aten.cumsum(x, d),
    aten._softmax.default: lambda x, d: aten._softmax(x, d, False),
    aten._log_softmax.default: lambda x, d: aten._log_softmax(x, d, False),
}


def test_every_lowering_with_an_axis_is_called() -> None:
    named = {
        operator
        for operator in registry.operators()
        if any(argument.name in NAMES for argument in operator._schema.arguments)
    }
    assert named == set(CALLS)


@pytest.mark.parametrize("operator", CALLS, ids=str)
def test_axes_from_the_end(operator: Any) -> None:
    def all_axes(x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for d in (-1, -2, -3):
            result = CALLS[operator](x, d)
            found += [result] if isinstance(result, Tensor) else list(result)
        return found

    assert_as_torch(lambda x: all_axes(x.detach()), lambda n: (X,), sizes=(1,))
