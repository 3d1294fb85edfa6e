"""Optimizers of torch's kind that others wrote, recorded as they are, or refused."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk import Trainer
from export.optimizers.protocol import PerTensor, bound
from export.optimizers.traced import Traced
from tests.export.test_optimizers import run_ours, slot


class Stepping(torch.optim.Optimizer):
    """What they have in common: a parameter after the other."""

    def __init__(self, parameters: Any, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(parameters, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(group, p, p.grad, self.state[p])

    def one(self, group: Any, p: Tensor, g: Tensor, state: Any) -> None:
        raise NotImplementedError


class Belief(Stepping):
    """AdaBelief (Zhuang et al. 2020), written as most are: Python's counts and roots."""

    def one(self, group: Any, p: Tensor, g: Tensor, state: Any) -> None:
        if len(state) == 0:
            state["step"], state["m"] = 0, torch.zeros_like(p)
            state["s"] = torch.zeros_like(p.data)
        state["step"] += 1
        state["m"].mul_(0.9).add_(g, alpha=0.1)
        apart = g - state["m"]
        state["s"].mul_(0.99).addcmul_(apart, apart, value=0.01).add_(1e-8)
        root = math.sqrt(1 - 0.99 ** state["step"])
        size = group["lr"] * root / (1 - 0.9 ** state["step"])
        p.data.addcdiv_(state["m"], state["s"].sqrt().add_(1e-8), value=-size)


class Lookahead(Stepping):
    """Keeps a second set of weights, which begins as the first, and rates by a shared number."""

    def one(self, group: Any, p: Tensor, g: Tensor, state: Any) -> None:
        if "slow" not in state:
            state["slow"], state["rate"] = p.clone(), torch.ones(())
        state["rate"] *= 0.9
        p.sub_(g * group["lr"] * state["rate"])
        state["slow"].lerp_(p, 0.5)
        p.copy_(torch.where(p.abs() > 1, state["slow"], p))


class Scaled(Stepping):
    """Goes by each parameter's own length, and otherwise in its first step."""

    def one(self, group: Any, p: Tensor, g: Tensor, state: Any) -> None:
        if "old" in state:
            g = g + 0.5 * state["old"]
            state["old"] = g * (1 - state["old"].abs().mean())
        else:
            state["old"] = 2 * g
        p.sub_(group["lr"] * g / (g.norm() + 1e-3))


class Clipping(torch.optim.SGD):
    """Clips within its step, by way of torch's own."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad.clamp(-0.1, 0.1)
        super().step()


@pytest.mark.parametrize("kind", [Belief, Lookahead, Scaled, Clipping])
def test_is_recorded(kind: Any, tmp_path: Path) -> None:
    trains_as_it_does(kind, tmp_path)


def trains_as_it_does(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 2)}
    optimizer = kind(model.parameters(), lr=0.05)

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return (m(b["x"]) - b["y"]).square().mean()

    exported = export.train_step(
        model, loss, batch, optimizer=optimizer, dynamic={}, directory=tmp_path / "a"
    )
    assert exported.manifest.optimizer.name == kind.__name__.lower()
    trainer = Trainer(exported.directory)
    for step in range(7):
        optimizer.param_groups[0]["lr"] = rate = 0.05 if step < 4 else 0.02
        optimizer.zero_grad()
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        trainer.step({key: each.numpy() for key, each in batch.items()}, hyper={"lr": rate})
    for name, value in model.named_parameters():
        np.testing.assert_allclose(trainer.parameters[name], value.detach(), rtol=1e-4, atol=1e-5)


def _with_half_of(own: Any) -> Any:
    @functools.wraps(own)
    def replaced(of: Any, *given: Any, **settings: Any) -> Any:
        if isinstance(of, torch.optim.Optimizer):
            for p in of.param_groups[0]["params"]:
                p.grad = p.grad / 2
            return own(of, *given, **settings)
        gradients, *others = given
        return own(of, [g / 2 for g in gradients], *others, **settings)

    return replaced


@pytest.mark.parametrize(
    ("owner", "name"), [(torch.optim.SGD, "step"), (sys.modules[torch.optim.SGD.__module__], "sgd")]
)
def test_what_was_replaced_in_torch_is_recorded_as_it_is(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, _with_half_of(getattr(owner, name)))
    trains_as_it_does(torch.optim.SGD, tmp_path)


class Counting(Stepping):
    def one(self, group: Any, p: Tensor, g: Tensor, state: Any) -> None:
        group["calls"] = group.get("calls", 0) + 1
        p.sub_(g * group["lr"] / group["calls"])


class Branching(Stepping):
    def one(self, group: Any, p: Tensor, g: Tensor, state: Any) -> None:
        if g.norm() > 1:
            p.sub_(g * group["lr"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counting, "goes by something else than parameters, gradients, tensors that it keeps"),
        (Branching, r"asks a tensor for what only a device knows \(bool\)"),
        (torch.optim.LBFGS, "LBFGS"),
        (torch.optim.SparseAdam, r"SparseAdam does not train 'weight' .*dense gradients"),
    ],
)
def test_is_refused(kind: Any, message: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(export.ExportError, match=message):
        export.train_step(
            model, lambda m, b: m(b["x"]).square().mean(), {"x": torch.randn(8, 4)},
            optimizer=kind(model.parameters()), dynamic={}, directory=tmp_path / "a",
        )  # fmt: skip


def test_state_that_is_a_pack_where_elements_are_alike() -> None:
    """State is divided by what its new values are multiplied by: a pass less at each step."""
    slots = [slot(0, torch.zeros(4, 3)), slot(1, torch.zeros(5))]
    adam: Any = bound(export.Adam(), slots)
    assert [(spec.name, spec.guarded) for spec in adam.state()] == [
        ("exp_avg", False), ("exp_avg_sq", True),
    ]  # fmt: skip
    assert adam.plan.scales == pytest.approx({"exp_avg": 0.1, "exp_avg_sq": 0.001})
    assert isinstance(bound(export.Adafactor(), slots), PerTensor)


class Damped(Stepping):
    """Divides by a sum that the rate is in."""

    def one(self, group: Any, p: Tensor, g: Tensor, state: Any) -> None:
        if not state:
            state["v"] = torch.zeros_like(p)
        p.sub_(group["lr"] * g / (group["lr"] * state["v"].addcmul_(g, g).sqrt() + 1))


def test_a_rate_of_zero_moves_none_of_many_parameters() -> None:
    """Nothing is divided by it, in whichever of the parameters."""
    start = [torch.full((2, 3), float(at)) for at in range(6)]
    moved = run_ours(Traced(Damped, lr=0.0), start, [[torch.ones(2, 3)] * 6] * 2)
    assert all(map(torch.equal, moved, start))
