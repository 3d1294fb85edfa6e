"""What a step computes of constants alone is a constant of its graph, whatever computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import export
from export.errors import ExportError
from tests.export.recorded import assert_as_torch, recorded

WEIGHT = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 3.0]])


def _prior(x: Tensor) -> Any:
    """The prior of normalising flows, as tutorials write it."""
    prior = torch.distributions.MultivariateNormal(torch.zeros(3), torch.eye(3))
    return prior.log_prob(x)


def _solved(x: Tensor) -> Any:
    below = torch.linalg.solve_triangular(WEIGHT, x.T, upper=False, unitriangular=True)
    return below.T + torch.linalg.solve_triangular(WEIGHT, x, upper=True, left=False)


def _whitened(x: Tensor) -> Any:
    values, vectors = torch.linalg.eigh(WEIGHT)
    return x @ (vectors * values.rsqrt()) @ torch.linalg.pinv(WEIGHT)


def _made_and_written(x: Tensor) -> Any:
    weight = torch.eye(3)
    weight.fill_diagonal_(2.0)
    weight[0] += 1
    return x @ torch.linalg.inv(weight)


@pytest.mark.parametrize("function", [_prior, _solved, _whitened, _made_and_written])
def test_operators_of_constants(function: Callable[[Tensor], Any]) -> None:
    assert_as_torch(function, lambda n: (torch.arange(3.0 * n).reshape(n, 3).sin(),))


def test_a_matrix_of_a_free_size_is_no_constant() -> None:
    with pytest.raises(ExportError, match="at most 64 rows, a fixed number"):
        recorded(
            lambda x: x + torch.linalg.inv(torch.eye(x.shape[0])).sum(),
            lambda n: (torch.ones(n, 3),),
        )


class Shifted(nn.Module):
    """Goes by way of NumPy, as code that was not written for tracing does."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.offsets = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        read = {"constant": self.offsets, "weight": self.layer.bias.detach()}[self.of]
        return self.layer(x) * x.new_tensor(read.numpy())


def test_a_constant_read_by_numpy(assert_parity: Callable[..., export.Exported]) -> None:
    torch.manual_seed(0)
    assert_parity(Shifted("constant"), {"x": torch.randn(5, 4)})


def test_what_a_step_computes_is_not_read_by_numpy(tmp_path: Path) -> None:
    """Recording, torch would give memory that nobody has written."""
    with pytest.raises(export.ExportError, match=r"\.numpy\(\)"):
        export.train_step(
            Shifted("weight"),
            lambda model, batch: model(batch["x"]).square().mean(),
            {"x": torch.randn(5, 4)},
            optimizer=export.Sgd(lr=0.1),
            dynamic={"x": {0: "batch"}},
            directory=tmp_path / "artifact",
            verify=False,
        )
