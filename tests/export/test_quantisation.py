"""Fake quantisation: torch's rounding, ranges and straight-through gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization

import export
from export.rewrites import quantisation


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("ends", [(-128, 127), (0, 255), (-8, 7)])
def test_observing_is_torchs(per_row: bool, even: bool, ends: tuple[int, int]) -> None:
    rows = 4 if per_row else 1

    def state(low: float, high: float) -> list[Tensor]:
        one = torch.tensor([1], dtype=torch.uint8)
        ranges = [torch.full((rows,), low), torch.full((rows,), high)]
        return [one, one, *ranges, torch.ones(rows), torch.zeros(rows, dtype=torch.int32)]

    how = (0.1, *ends, 0, per_row, even)
    for low, high in ((float("inf"), -float("inf")), (-0.5, 2.0), (-0.3, 0.1)):
        for x in (_numbers(4, 6), _numbers(4, 6) + 2, _numbers(4, 6) * 0.01 - 1):
            own, theirs = state(low, high), state(low, high)
            given = [x.clone().requires_grad_(), x.clone().requires_grad_()]
            y = quantisation.observed(given[0], *own, *how)
            wanted = torch.fused_moving_avg_obs_fake_quant(given[1], *theirs, *how)
            torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-7)
            for result in (y, wanted):
                result.sin().sum().backward()
            torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-4, atol=1e-5)


class Grid(nn.Module):
    """Weights on a grid of each row's own, outputs on one grid."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("scale", torch.tensor([0.05, 0.1, 0.07, 0.2]))
        self.register_buffer("zero", torch.tensor([0, 1, -1, 0], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_channel_affine(
            self.linear.weight, self.scale, self.zero, 0, -8, 7
        )
        h = nn.functional.linear(x, weight, self.linear.bias)
        return torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127)


def test_a_grid_of_ones_own(assert_parity: Any) -> None:
    torch.manual_seed(0)
    assert_parity(Grid(), {"x": _numbers(6, 6)})


def test_prepared_for_quantisation_aware_training(assert_parity: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    prepared = quantization.prepare_qat(model)
    prepared(_numbers(6, 6))  # the observers' first ranges
    assert_parity(prepared, {"x": _numbers(6, 6)})


def test_an_observer_apart_is_refused_with_the_one_that_fits(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4), quantization.FakeQuantize())
    with pytest.raises(export.ExportError, match=r"1 \(FakeQuantize\).*FusedMovingAvgObs"):
        export.train_step(
            model, lambda m, b: m(b["x"]).square().mean(), {"x": _numbers(6, 6)},
            optimizer=export.Sgd(0.1), dynamic={"x": {0: "batch"}}, directory=tmp_path,
        )  # fmt: skip
