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

Batch = dict[str, Tensor]


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


class Model(nn.Module):
    """Two heads on one layer, and what is there for nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(4, 6)
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)
        self.unused = nn.Linear(6, 3)
        self.table = nn.Parameter(torch.randn(300, 300))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.layer(x))
        return self.first(h), self.second(h)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    first, second = model(batch["x"])
    return (first.square() + 0.1 * second).mean()


def _losses(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    first, second = model(batch["x"])
    return {"first": first.square().mean(), "second": (second - 1).square().mean()}


class Sum:
    """Of two losses, each of which leaves the other's head alone."""

    def combine(self, losses: Any, gradients: Any, parameters: Any, batch: Any) -> Any:
        both = zip(gradients["first"], gradients["second"], strict=True)
        return export.StepDirection(sum(losses.values()), [a + b for a, b in both])


def _penalised(model: nn.Module, batch: Batch) -> Tensor:
    return _loss(model, batch) + 0.15 * sum(p.square().sum() for p in model.parameters())


def _summed(model: nn.Module, batch: Batch) -> Tensor:
    return sum(_losses(model, batch).values(), torch.zeros(()))


def _batch(seed: int) -> Batch:
    return {"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))}


def _trained(
    folder: Path, loss: Any, ours: Any, theirs: Any, torch_loss: Any = None, **more: Any
) -> Trainer:
    """Beside torch, which trains by ``torch_loss`` with the optimizer that ``theirs`` makes."""
    model = Model()
    scalars = more.pop("scalars", {})
    exported = export.train_step(
        model, loss, {**_batch(0), **scalars}, dynamic={"x": {0: "batch"}}, directory=folder,
        optimizer=ours(model) if callable(ours) else ours,
        predict=lambda model, batch: {"y": model.unused(torch.tanh(model.layer(batch["x"])))},
        **more,
    )  # fmt: skip
    trainer, optimizer = Trainer(exported.directory), theirs(model)
    for seed in range(4):
        model.zero_grad()
        (torch_loss or loss)(model, _batch(seed)).backward()
        optimizer.step()
        trainer.step({name: value.numpy() for name, value in {**_batch(seed), **scalars}.items()})
    held = {**trainer.parameters, **trainer.buffers}
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(held[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    return trainer


def test_are_left_as_they_are(tmp_path: Path) -> None:
    trainer = _trained(tmp_path / "a", _loss, _whole, _whole)
    assert {name.split(".")[0] for name in trainer.parameters} == {"layer", "first", "second"}
    # Nor have they state; a prediction that reads them reads what they are set to.
    state = {name for name in trainer.state if name.startswith("adamw")}
    assert state == {"adamw.exp_avg.packed", "adamw.exp_avg_sq.packed"}
    trainer.set_parameters({"unused.weight": np.zeros((3, 6), np.float32)})
    trainer.set_parameters({"unused.bias": np.arange(3, dtype=np.float32)})
    predicted = trainer.predict({"x": _batch(1)["x"].numpy()})["y"]
    np.testing.assert_array_equal(predicted, np.tile(np.arange(3.0), (5, 1)))


def test_in_groups_and_within_combinators(tmp_path: Path) -> None:
    """A group of which the loss uses some, and two of which it uses none."""
    kinds = {"table": {"lr": 0.5}, "unused.*": {"weight_decay": 0.5}, "*.bias": {"lr": 0.01}}
    groups = [export.Group(name, settings) for name, settings in kinds.items()]
    ours = export.Averaged(
        export.Clipped(export.Groups(export.AdamW(0.1, weight_decay=0.1), *groups), norm=100.0)
    )

    def theirs(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        biases = [p for n, p in named.items() if n.endswith("bias") and n != "unused.bias"]
        weights = [p for n, p in named.items() if n.endswith("weight") and n != "unused.weight"]
        rest = [named["unused.weight"], named["unused.bias"], named["table"]]
        return torch.optim.AdamW(
            [{"params": weights}, {"params": biases, "lr": 0.01}, {"params": rest}],
            lr=0.1,
            weight_decay=0.1,
        )

    trainer = _trained(tmp_path / "a", _loss, ours, theirs)
    assert set(trainer.averages) == set(trainer.parameters)
    _trained(tmp_path / "b", _loss, theirs, theirs)


def test_a_gradient_rule_has_zeros_where_another_loss_has_none(tmp_path: Path) -> None:
    trainer = _trained(tmp_path / "a", _losses, _whole, _whole, _summed, gradient=Sum())
    assert "table" not in trainer.parameters


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_penalty_on_all_parameters_uses_them(tmp_path: Path, optimizer: Any) -> None:
    make = lambda model: optimizer(model.parameters(), lr=0.05, weight_decay=0.1)  # noqa: E731
    trainer = _trained(
        tmp_path / "a", _loss, make, make, _penalised,
        gradient=export.WeightPenalty("l2"), scalars={"l2": torch.tensor(0.3)},
    )  # fmt: skip
    assert "table" in trainer.parameters
