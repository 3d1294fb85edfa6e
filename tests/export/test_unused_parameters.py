"""Parameters that the loss has no gradient for: torch's optimizers leave them as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk.trainer import Trainer


class TwoHeads(nn.Module):
    """One head is trained; the other, and a copy of the first that follows it, are not."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 3)
        self.follower = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.follower.weight.mul_(0.9).add_(self.head.weight, alpha=0.1)
            goal = self.follower(x)
        return (self.head(x) - goal - 1).square().mean()


def _whole(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def _by_part(model: Any) -> Any:
    parts = [model.head, model.unused, model.follower]
    return torch.optim.SGD([{"params": list(part.parameters())} for part in parts], 0.1, 0.9, 0, 1)


@pytest.mark.parametrize("optimizer", [_whole, _by_part])
def test_no_decay_without_a_gradient(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    x = torch.randn(8, 4)
    exported = export.train_step(
        model, lambda m, b: m(b["x"]), {"x": x}, optimizer=optimizer(model),
        dynamic={"x": {0: "batch"}}, predict=lambda m, b: {"y": m.head(b["x"])},
        directory=tmp_path / "artifact",
    )  # fmt: skip
    assert exported.report is not None
    assert {"unused.weight", "unused.bias", "follower.bias"} <= set(exported.report.unmoved)
    trainer = Trainer(tmp_path / "artifact")
    torchs = optimizer(model)
    for _ in range(3):
        trainer.step({"x": x.numpy()})
        torchs.zero_grad()
        model(x).backward()
        torchs.step()
    assert set(trainer.parameters) == {"head.weight", "head.bias"}
    found = {**trainer.parameters, **trainer.buffers}
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(
            found[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6, err_msg=name
        )
