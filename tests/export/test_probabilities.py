"""Sigmoids whose logarithm is taken keep their digits far below 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import export
from device_sdk import Trainer

Loss = Callable[[Tensor], Tensor]
READ: dict[str, Loss] = {
    "cross-entropy": lambda h: functional.binary_cross_entropy(
        torch.sigmoid(h).squeeze(1), torch.ones(h.shape[0])
    ),
    "logarithm": lambda h: -torch.log(h.sigmoid()).mean(),
    "product": lambda h: -torch.log(h.sigmoid() * (0.1 * h).sigmoid()).mean(),
}


def _trainer(loss: Loss, folder: Path) -> tuple[nn.Linear, Trainer]:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    exported = export.train_step(
        model, lambda m, b: loss(m(b["x"])), {"x": torch.linspace(-1, 2, 4).reshape(4, 1)},
        optimizer=export.Sgd(1e-3), dynamic={"x": {0: "batch"}}, directory=folder,
        predict=lambda m, b: {"p": torch.sigmoid(m(b["x"]))},
    )  # fmt: skip
    return model, Trainer(exported.directory)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("logit", [-60.0, -20.0, -16.0, 30.0])
def test_far_from_zero(name: str, logit: float, tmp_path: Path) -> None:
    model, trainer = _trainer(READ[name], tmp_path / "artifact")
    x = torch.tensor([[logit]])
    assert trainer.predict({"x": x.numpy()})["p"].item() == pytest.approx(
        torch.sigmoid(x).item(), rel=1e-5
    )
    loss = READ[name](model(x))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), 1e-3).step()
    assert trainer.step({"x": x.numpy()}) == pytest.approx(loss.item(), rel=1e-5, abs=1e-12)
    moved = trainer.parameters["weight"].item()
    assert moved == pytest.approx(model.weight.item(), abs=1e-7)


def test_gates_stay_one_operator(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.SiLU(), nn.Linear(4, 1), nn.GLU(0))
    exported = export.train_step(
        model, lambda m, b: m(b["x"]).square().mean(), {"x": torch.randn(4, 2)},
        optimizer=export.Sgd(1e-3), dynamic={}, directory=tmp_path / "artifact",
        predict=lambda m, b: {"h": m[:3](b["x"])},
    )  # fmt: skip
    for file in ("train.onnx", "infer.onnx"):
        nodes = onnx.load(exported.directory / file).graph.node
        assert "Sigmoid" in {node.op_type for node in nodes}
        assert "Exp" not in {node.op_type for node in nodes}
