"""What a step computes of constants alone is a constant of its graph, whatever computes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from export.errors import ExportError
from tests.export.recorded import assert_as_torch, recorded

WEIGHT = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 3.0]])


def _prior(x: Tensor) -> Tensor:
    """The prior of normalising flows, as tutorials write it."""
    prior = torch.distributions.MultivariateNormal(torch.zeros(3), torch.eye(3))
    return prior.log_prob(x)


def _solved(x: Tensor) -> Tensor:
    below = torch.linalg.solve_triangular(WEIGHT, x.T, upper=False, unitriangular=True)
    return below.T + torch.linalg.solve_triangular(WEIGHT, x, upper=True, left=False)


def _whitened(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(WEIGHT)
    return x @ (vectors * values.rsqrt()) @ torch.linalg.pinv(WEIGHT)


def _made_and_written(x: Tensor) -> Tensor:
    weight = torch.eye(3)
    weight.fill_diagonal_(2.0)
    weight[0] += 1
    return x @ torch.linalg.inv(weight)


@pytest.mark.parametrize("function", [_prior, _solved, _whitened, _made_and_written])
def test_operators_of_constants(function: Callable[[Tensor], Tensor]) -> None:
    assert_as_torch(function, lambda n: (torch.arange(3.0 * n).reshape(n, 3).sin(),))


def test_a_matrix_of_a_free_size_is_no_constant() -> None:
    with pytest.raises(ExportError, match=r"no lowering.*linalg"):
        recorded(
            lambda x: x + torch.linalg.inv(torch.eye(x.shape[0])).sum(),
            lambda n: (torch.ones(n, 3),),
        )
