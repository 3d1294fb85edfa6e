"""An optimizer written against the protocol alone: a history of gradients and a shared scalar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import export
from device_sdk import Trainer


@dataclass(frozen=True)
class HistoryMomentum:
    """The mean of the last three gradients, over the running norm of all parameters' gradients."""

    lr: float = 0.05

    @property
    def name(self) -> str:
        return "history"

    def settings(self) -> dict[str, object]:
        return {"length": 3}

    def hyper(self) -> dict[str, float]:
        return {"lr": self.lr}

    def state(self) -> tuple[export.StateSpec, ...]:
        return (
            export.StateSpec("past", lead=(3,)),
            export.StateSpec("norm", per_parameter=False),
        )

    def update(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> export.OptimizerUpdate:
        squares = torch.stack([(g * g).sum() for g in gradients])
        norm = 0.9 * state["norm"][0] + 0.1 * torch.sqrt(squares.sum())
        moved, histories = [], []
        for p, g, past in zip(parameters, gradients, state["past"], strict=True):
            history = torch.cat([past[1:], g.unsqueeze(0)])
            count = torch.clamp(step + 1, max=3).to(p.dtype)
            moved.append(p - hyper["lr"] * history.sum(0) / count / (norm + 1e-3))
            histories.append(history)
        return export.OptimizerUpdate(moved, {"past": histories, "norm": [norm]})


def test_history_and_shared_state_train_as_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11000), nn.Tanh(), nn.Linear(11000, 2))
    batch = {"x": torch.randn(5, 6)}

    def loss(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return m(b["x"]).pow(2).mean()

    optimizer = HistoryMomentum()
    exported = export.train_step(
        model,
        loss,
        batch,
        optimizer=optimizer,
        dynamic={"x": {0: "batch"}},
        directory=tmp_path / "artifact",
    )
    trainer = Trainer(exported.directory)
    values = list(model.parameters())
    past = [torch.zeros(3, *p.shape) for p in values]
    norm = [torch.zeros(())]
    for step in range(5):
        gradients = list(torch.autograd.grad(loss(model, batch), values))
        update = optimizer.update(
            [p.detach() for p in values],
            gradients,
            {"past": past, "norm": norm},
            torch.tensor(step),
            {"lr": torch.tensor(0.05)},
        )
        past, norm = update.state["past"], update.state["norm"]
        with torch.no_grad():
            for parameter, value in zip(values, update.parameters, strict=True):
                parameter.copy_(value)
        trainer.step({"x": batch["x"].numpy()})
    for name, parameter in model.named_parameters():
        want = parameter.detach().numpy()
        np.testing.assert_allclose(trainer.parameters[name], want, rtol=1e-3, atol=1e-5)
