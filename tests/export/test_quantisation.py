"""Fake quantisation: torch's rounding, ranges and straight-through gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization

import export
from device_sdk import Trainer
from export.wing import quantisation


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


APART = {
    "average": {"observer": quantization.MovingAverageMinMaxObserver, "quant_min": 0},
    # Of 255 steps the widest value would lie between two of them, on which side rounding decides.
    "widest, even": {
        "observer": quantization.MinMaxObserver,
        "qscheme": torch.per_tensor_symmetric,
        "quant_max": 254,
    },
    "rows": {
        "observer": quantization.PerChannelMinMaxObserver,
        "qscheme": torch.per_channel_affine,
        "ch_axis": 1,
    },
    "rows' average, even": {
        "observer": quantization.MovingAveragePerChannelMinMaxObserver,
        "qscheme": torch.per_channel_symmetric,
        "dtype": torch.qint8,
        "quant_min": -128,
        "quant_max": 126,
        "ch_axis": 1,
    },
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", APART)
def test_an_observer_apart_from_its_rounding(name: str, tmp_path: Path) -> None:
    """Also while it is switched off, on the device."""
    torch.manual_seed(0)
    given = {"quant_min": 0, "quant_max": 255, "dtype": torch.quint8, **APART[name]}
    model = nn.Sequential(nn.Linear(6, 4), quantization.FakeQuantize(**given)).train()
    model(_numbers(6, 6))
    exported = export.train_step(
        model, lambda m, b: m(b["x"]).sin().sum(), {"x": _numbers(6, 6)},
        optimizer=export.Sgd(0.1), dynamic={"x": {0: "batch"}}, directory=tmp_path / "artifact",
    )  # fmt: skip
    trainer = Trainer(exported.directory)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        if step == 2:
            model.apply(quantization.disable_observer)
            trainer.set_parameters({"1.observer_enabled": np.zeros(1, np.uint8)})
        x = _numbers(5, 6) * (step + 1)
        loss = model(x).sin().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step({"x": x.numpy()}) == pytest.approx(loss.item(), rel=1e-4)
    for key, value in model[1].named_buffers(prefix="1"):
        np.testing.assert_allclose(trainer.buffers[key], value.numpy(), rtol=1e-5, err_msg=key)


def test_an_observer_that_counts_is_refused_with_those_that_fit(tmp_path: Path) -> None:
    counting = quantization.FakeQuantize(observer=quantization.HistogramObserver)
    model = nn.Sequential(nn.Linear(6, 4), counting)
    with pytest.raises(export.ExportError, match=r"1 \(FakeQuantize\).*FusedMovingAvgObs"):
        export.train_step(
            model, lambda m, b: m(b["x"]).square().mean(), {"x": _numbers(6, 6)},
            optimizer=export.Sgd(0.1), dynamic={"x": {0: "batch"}}, directory=tmp_path,
        )  # fmt: skip
