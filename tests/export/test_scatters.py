"""Scatters and reductions by index: every way to join, with its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.export.recorded import assert_as_torch


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "amax", "amin"])
def test_scatter_reduce(reduce: str, include_self: bool) -> None:
    """Rows onto part of wider rows, and into a last axis counted from the end."""

    def scatter(nodes: Tensor, messages: Tensor, to: Tensor, wide: Tensor) -> list[Tensor]:
        return [
            nodes.scatter_reduce(0, to, messages, reduce, include_self=include_self),
            wide.scatter_reduce(-1, to, messages, reduce, include_self=include_self),
        ]

    assert_as_torch(
        scatter, lambda n: (_numbers(5, 4), _numbers(n, 3), _whole(3, n, 3), _numbers(n, 6))
    )


def test_scatters_read_what_the_index_covers() -> None:
    def scatter(x: Tensor, source: Tensor, to: Tensor) -> list[Tensor]:
        # Torch has no gradient of a source that is wider than the index.
        source = source.detach()
        return [x.scatter_add(1, to, source), x.scatter(1, to[:, :1], source)]

    assert_as_torch(scatter, lambda n: (_numbers(n, 5), _numbers(n, 4), _whole(5, n, 3)))


@pytest.mark.parametrize("reduce", ["mean", "prod", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_index_reduce(reduce: str, include_self: bool) -> None:
    def scatter(nodes: Tensor, messages: Tensor, to: Tensor) -> Tensor:
        kept = nodes.detach() if reduce == "prod" else nodes
        sent = messages.detach() if reduce == "prod" else messages
        reduced = kept.index_reduce(1, to, sent, reduce, include_self=include_self)
        return reduced * nodes.sum()

    assert_as_torch(scatter, lambda n: (_numbers(2, 4, 3), _numbers(2, n, 3), _whole(3, n)))
