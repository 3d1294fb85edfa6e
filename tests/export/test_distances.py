"""Distances between rows, with torch's gradient of 0 where a distance is 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.export.recorded import assert_as_torch


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, float("inf")])
def test_cdist(p: float) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return torch.cdist(x, y, p)

    assert_as_torch(run, lambda n: (_rows(n, 5), _rows(9, 5)))


def test_cdist_of_rows_with_themselves() -> None:
    assert_as_torch(lambda x: torch.cdist(x, x), lambda n: (_rows(n, 5),))


def test_the_gradient_of_rows_far_from_zero() -> None:
    """Of differences, as torch's: of two products that nearly cancel nothing would be left."""
    x = 100 + torch.arange(18.0).reshape(6, 3).cos() / 64
    few = lambda n: (x[:n] if n < 6 else torch.cat([x, x[:1] + 1]),)  # noqa: E731
    assert_as_torch(lambda x: torch.cdist(x, x.flip(1)), few, sizes=(4, 7))


def test_cdist_by_one_product() -> None:
    """From 26 rows on, as in torch, over two leading axes that broadcast."""
    assert_as_torch(torch.cdist, lambda n: (_rows(2, 1, n, 5), _rows(1, 3, 40, 5)), atol=2e-4)


def test_pdist_and_pairs() -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        near = [functional.pairwise_distance(x, y), functional.cosine_similarity(x, y)]
        return [functional.pdist(x.T @ y), functional.pdist(x).exp().sum(), *near]

    assert_as_torch(run, lambda n: (_rows(n, 5), _rows(n, 5).cos()))
