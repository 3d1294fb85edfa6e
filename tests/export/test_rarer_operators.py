"""Orderings, gamma functions and sampling by grids: values and gradients as torch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import export
from device_sdk import NonFiniteStep, Trainer
from tests.export.recorded import assert_as_torch


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _both(pair: tuple[Tensor, Tensor]) -> Tensor:
    """Values, and places as numbers that have no gradient."""
    return pair[0] * (1 + pair[1])


ORDERED: dict[str, Callable[[Tensor], Any]] = {
    "median": lambda x: _both(x.median(1)),
    "median of the batch": lambda x: _both(x.median(0, keepdim=True)),
    "median of all": lambda x: x.median(),
    "kthvalue": lambda x: _both(x.kthvalue(2, 1, keepdim=True)) + x.kthvalue(1, 0).values,
    "cummax": lambda x: _both(x.cummax(1)) + x.cummax(0).values,
    "cummin": lambda x: _both(x.cummin(-1)) + torch.cummin(x.round(), 0).values,
    "cummax of ties": lambda x: torch.cummax(x.round().to(torch.int64), 1)[1] * x,
    "logcumsumexp": lambda x: (30 * x).logcumsumexp(1) + x.logcumsumexp(0),
    "searchsorted": lambda x: torch.searchsorted(x.sort(1).values, x.flip(1) * 0.9) * x,
    "searchsorted, right": lambda x: (
        torch.searchsorted(torch.arange(-2.0, 3.0), x.round(), right=True) * x
        + torch.searchsorted(torch.arange(-2.0, 3.0), x.round(), side="left", out_int32=True) * x
    ),
    "searchsorted, one": lambda x: torch.searchsorted(torch.arange(-2.0, 3.0), 0.5) * x,
    "softmax of a number": lambda x: x + x.sum().softmax(0) * x.sum() + x.mean().log_softmax(-1),
    "cumprod of float32": lambda x: x.relu().cumprod(1) + (x + 3).cumprod(0),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ORDERED)
def test_orderings(name: str) -> None:
    assert_as_torch(ORDERED[name], lambda n: (_numbers(n, 5),))


def test_bilinear_forms() -> None:
    def run(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.bilinear(x, y, weight, bias) + functional.bilinear(x, y, weight[:1])

    shapes = (3,), (5,)
    for lead in ((), (2,)):
        assert_as_torch(
            run,
            lambda n, lead=lead: (  # type: ignore[misc]
                *(_numbers(*lead, n, *shape) for shape in shapes), _numbers(4, 3, 5), _numbers(4),
            ),
        )  # fmt: skip


def _of_squares(a: Tensor, b: Tensor) -> list[Tensor]:
    sign, log = torch.linalg.slogdet(a)
    return [
        torch.linalg.inv(a),
        torch.linalg.solve(a, b),
        a[0].inverse() @ b[0, :, 0],
        torch.linalg.solve(a, b[..., 0]),
        sign * log,
        a.det(),
        (a @ a.mT).logdet(),
    ]


def test_inverses_and_determinants() -> None:
    """Also of matrices whose diagonal is 0, and of one row."""
    apart = 1 - torch.eye(4)
    assert_as_torch(_of_squares, lambda n: (_numbers(n, 4, 4) * apart, _numbers(n, 4, 2)))
    assert_as_torch(
        lambda a: torch.inverse(a).sum() + torch.slogdet(a)[1], lambda n: (_numbers(n, 1, 1),)
    )


def _triangular(a: Tensor, b: Tensor) -> list[Tensor]:
    spread = a @ a.mT + torch.eye(4)
    low, high = torch.linalg.cholesky(spread), torch.linalg.cholesky(spread, upper=True)
    mean, number = torch.zeros(4), torch.distributions.MultivariateNormal
    solve = torch.linalg.solve_triangular
    return [
        low,
        high,
        solve(spread, b, upper=False),
        solve(spread, b.mT, upper=True, left=False),
        solve(a, b, upper=True, unitriangular=True),
        torch.cholesky_solve(b, low) + b.cholesky_solve(high, upper=True),
        torch.cholesky_inverse(low),
        number(mean, spread).log_prob(b.mT[..., :1, :]),
        number(mean, scale_tril=low[0]).log_prob(b[0].mT),
    ]


@pytest.mark.exhaustive
def test_cholesky_factors_and_triangular_solutions() -> None:
    assert_as_torch(_triangular, lambda n: (_numbers(n, 4, 4), _numbers(n, 4, 2)))


def test_the_old_names_of_the_cholesky_factor() -> None:
    """torch 2.14 has them no more, and says what is called instead."""
    try:
        torch.eye(2).cholesky()
    except RuntimeError as error:
        assert "torch.linalg.cholesky" in str(error)
    else:
        one = torch.eye(4)
        assert_as_torch(
            lambda a: [torch.cholesky(a @ a.mT + one), (a @ a.mT + one).cholesky(upper=True)],
            lambda n: (_numbers(n, 4, 4),),
        )


def test_gamma_functions() -> None:
    """Also near their poles, at large arguments and where the logarithm is 0."""
    some = torch.cat([
        torch.linspace(0.01, 4, 80), torch.linspace(-3.9, -0.1, 60), torch.tensor([1e-4, 1, 2]),
        torch.tensor([30.0, 1e3, 1e7]),
    ])  # fmt: skip
    # At 0.05 from the poles, where float32 torch is exact as well.
    some = torch.where((some < 0) & ((some - some.round()).abs() < 0.05), some.round() + 0.1, some)

    def run(x: Tensor) -> list[Tensor]:
        return [torch.lgamma(x), torch.digamma(x)]

    assert_as_torch(run, lambda n: (some,), sizes=(1,), atol=1e-5)
    assert_as_torch(
        lambda x, y: torch.distributions.Beta(x.exp(), 0.5 + x.abs()).log_prob(y.sigmoid()),
        lambda n: (_numbers(n, 3), _numbers(n, 3) * 0.5),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mode", "padding", "aligned"),
    [
        ("bilinear", "zeros", False),
        ("bilinear", "border", True),
        ("nearest", "zeros", True),
        ("nearest", "border", False),
        ("bilinear", "reflection", True),
        ("bicubic", "reflection", False),
    ],
)
def test_sampling_by_a_grid(mode: str, padding: str, aligned: bool) -> None:
    def run(x: Tensor, grid: Tensor, turn: Tensor) -> Tensor:
        how: Any = {"mode": mode, "padding_mode": padding, "align_corners": aligned}
        moved = functional.affine_grid(turn, list(x.shape), align_corners=aligned)
        return functional.grid_sample(x, torch.cat([grid, moved], 1), **how)

    turn = torch.tensor([[[0.9, 0.2, 0.11], [-0.3, 0.8, 0.05]]])
    assert_as_torch(
        run,
        lambda n: (_numbers(n, 2, 5, 4), _numbers(n, 3, 4, 2), turn.expand(n, 2, 3).clone()),
        sizes=(1, 7),
    )


@pytest.mark.exhaustive
def test_sampling_of_volumes() -> None:
    def run(x: Tensor, grid: Tensor, turn: Tensor) -> Tensor:
        moved = functional.affine_grid(turn, [*x.shape], align_corners=True) * 1.5
        middle = functional.grid_sample(x, moved, padding_mode="reflection", align_corners=False)
        return functional.grid_sample(middle, grid, align_corners=False) + functional.grid_sample(
            middle, grid, "nearest", "border", align_corners=True
        )

    assert_as_torch(
        run,
        lambda n: (_numbers(2, 2, 3, n, 4), _numbers(2, n, 2, 3, 3), _numbers(2, 3, 4)),
        sizes=(2, 7),
    )


def test_the_border_itself_has_no_gradient() -> None:
    """A transformer network begins there: its first grid is the picture's own."""

    def run(x: Tensor, grid: Tensor) -> Tensor:
        return functional.grid_sample(x, grid, padding_mode="border", align_corners=True)

    own = functional.affine_grid(torch.eye(2, 3).unsqueeze(0), [1, 1, 4, 4], align_corners=True)
    assert_as_torch(run, lambda n: (_numbers(n, 2, 4, 4), own.expand(n, 4, 4, 2).clone()))


def test_a_table_with_sparse_gradients(assert_parity: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4, sparse=True)
            self.bag = nn.EmbeddingBag(7, 4, mode="sum", sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x).sum(1) * self.bag(x).tanh()

    assert_parity(Model(), {"x": torch.arange(18).reshape(6, 3) % 7})


def test_a_table_whose_rows_are_shortened(assert_parity: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4, max_norm=1.0)
            self.bag = nn.EmbeddingBag(7, 4, mode="sum", max_norm=0.5, norm_type=1.0)

        def forward(self, x: Tensor) -> Tensor:
            rows: Tensor = self.table(x).sum(1) * self.bag(x).tanh() + self.table.weight[0]
            return rows

    assert_parity(Model(), {"x": torch.arange(18).reshape(6, 3) % 5})


def test_a_normal_likelihood_checks_its_variance(tmp_path: Path) -> None:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        mean = m(b["x"])
        whole = functional.gaussian_nll_loss(mean, b["y"], b["v"].expand(-1, 2), full=True)
        return whole + functional.gaussian_nll_loss(mean, b["y"], mean.exp().mean(1), eps=0.5)

    batch = {"x": _numbers(6, 4), "y": _numbers(6, 2), "v": _numbers(6, 1).abs()}
    model = nn.Linear(4, 2)
    exported = export.train_step(
        model, loss, batch, optimizer=export.Sgd(0.1),
        dynamic={key: {0: "batch"} for key in batch}, directory=tmp_path / "artifact",
    )  # fmt: skip
    trainer = Trainer(exported.directory)
    given = {key: each.numpy() for key, each in batch.items()}
    assert trainer.step(given) == pytest.approx(loss(model, batch).item(), rel=1e-5)
    with pytest.raises(NonFiniteStep):
        trainer.step(given | {"v": -np.ones((6, 1), np.float32)})


def test_logits_by_pieces(assert_parity: Any) -> None:
    make = getattr(functional, "linear_cross_entropy", None)
    if make is None:
        pytest.skip("torch 2.13")

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        options = nn.LinearCrossEntropyOptions()
        result: Tensor = make(b["x"], m.weight, b["y"], linear_bias=m.bias, options=options)
        return result

    batch = {"x": _numbers(6, 4), "y": torch.arange(6) % 3}
    assert_parity(nn.Linear(4, 3), batch, loss=loss)
