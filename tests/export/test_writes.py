"""Writes into state, diagonals and places; what a selection of unknown length is reduced to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import export
from device_sdk import Trainer

Batch = dict[str, Tensor]
ROWS = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(1))}


class Taught(nn.Module):
    """A student, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(4, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.codes = nn.Parameter(torch.randn(3, 3))


def _pull(model: Taught, batch: Batch) -> Tensor:
    with torch.no_grad():
        goal = model.teacher(batch["x"]).tanh()
    return F.mse_loss(model.student(batch["x"]).tanh() + 0.3, goal)


def _in_place(model: Taught, batch: Batch) -> Tensor:
    loss = _pull(model, batch)
    for p, q in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
        q.data.mul_(0.9).add_(p.data, alpha=0.1)
    return loss


def _replaced_data(model: Taught, batch: Batch) -> Tensor:
    for p, q in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
        q.data = q.data * 0.9 + p.data * 0.1
    return _pull(model, batch)


def _replaced_parameter(model: Taught, batch: Batch) -> Tensor:
    codes = model.codes
    nearest = torch.cdist(model.student(batch["x"]), codes).argmin(1)
    chosen = F.one_hot(nearest, 3).float()
    model.codes = nn.Parameter(codes * 0.9 + chosen.t() @ model.student(batch["x"]) * 0.1)
    return _pull(model, batch)


def _clipped(model: Taught, batch: Batch) -> Tensor:
    for p in model.student.parameters():
        p.data.clamp_(-0.2, 0.2)
    return model.student(batch["x"]).pow(2).mean()


def _normalised(model: Taught, batch: Batch) -> Tensor:
    with torch.no_grad():
        model.codes.copy_(F.normalize(model.codes, dim=1))
    return (model.student(batch["x"]) @ model.codes.t()).logsumexp(1).mean()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "loss", [_in_place, _replaced_data, _replaced_parameter, _clipped, _normalised]
)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_that_writes_into_state_is_torchs(
    loss: Callable[[Taught, Batch], Tensor], decay: float, tmp_path: Path
) -> None:
    model = Taught()

    def optimizer(of: Taught) -> torch.optim.Optimizer:
        trained = [p for p in of.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01, weight_decay=decay)

    export.train_step(
        model, loss, ROWS, optimizer=optimizer(model), dynamic={"x": {0: "batch"}},
        directory=tmp_path / "a",
    )  # fmt: skip
    trainer = Trainer(tmp_path / "a")
    torchs = optimizer(model)
    for _ in range(4):
        expected = loss(model, ROWS)
        torchs.zero_grad()
        expected.backward()
        torchs.step()
        assert trainer.step({"x": ROWS["x"].numpy()}) == pytest.approx(expected.item(), rel=1e-5)
    got = {**trainer.parameters, **trainer.buffers}
    for name, tensor in model.named_parameters():
        np.testing.assert_allclose(got[name], tensor.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_data_of_another_shape_is_refused(tmp_path: Path) -> None:
    def loss(model: Taught, batch: Batch) -> Tensor:
        model.teacher.weight.data = model.teacher.weight.data[:2]
        return _pull(model, batch)

    with pytest.raises(export.ExportError, match="is given data of shape"):
        export.train_step(
            Taught(), loss, ROWS, optimizer=export.Sgd(lr=0.1), dynamic={}, directory=tmp_path / "a"
        )


def _stretched(model: nn.Module, batch: Batch) -> Tensor:
    """Writes into every second place, of a free axis and of a fixed one."""
    h = model(batch["x"])
    places = torch.zeros(h.shape[0], 6)
    places[:, 0::2] = torch.sin(h)
    places[:, 1::2] = torch.cos(h)
    places[1::2] = 0.5
    return places.pow(3).mean()


def _shown(model: nn.Module, batch: Batch) -> tuple[Tensor, Batch]:
    """Nothing reads what was written but whoever looks at the outputs."""
    h = model(batch["x"])
    shown = h * 1.0
    shown[1:] *= 2.0
    return h.square().mean(), {"shown": shown}


def _decorrelated(model: nn.Module, batch: Batch) -> Tensor:
    h = model(batch["x"])
    c = h.t() @ h / h.shape[0]
    return torch.diagonal(c).add_(-1).pow_(2).sum() + 0.1 * c.pow(2).sum()


def _penalised(model: nn.Module, batch: Batch) -> Tensor:
    """A gradient's length as part of the loss: without ``predict``, prediction takes it, too."""
    x = batch["x"].detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    return slope.pow(2).sum(1).mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [_stretched, _shown, _decorrelated, _penalised])
def test_views_are_written_and_gradients_taken(
    loss: Callable[[nn.Module, Batch], Any], assert_parity: Callable[..., export.Exported]
) -> None:
    torch.manual_seed(0)
    assert_parity(nn.Linear(4, 3), ROWS, loss=loss)


def test_hooks_that_remember_their_model(assert_parity: Callable[..., export.Exported]) -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
            self.seen: dict[str, Tensor] = {}
            self.body.register_forward_hook(
                lambda module, args, result: self.seen.__setitem__("body", result)
            )

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.body(x).tanh())
            return y

    def loss(model: Hooked, batch: Batch) -> Tensor:
        return model(batch["x"]).pow(2).mean() + model.seen["body"].pow(4).mean()

    assert_parity(Hooked(), ROWS, loss=loss)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "reduced",
    [
        lambda v: v.logsumexp(0),
        lambda v: v.std(),
        lambda v: v.cumsum(0).pow(2).mean(),
        lambda v: F.linear(v.unsqueeze(1), torch.ones(3, 1)).tanh().mean(),
    ],
)
def test_reductions_of_a_selection(
    reduced: Callable[[Tensor], Tensor], assert_parity: Callable[..., export.Exported]
) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch["x"]).tanh()
        return reduced(h[h > -0.1])

    torch.manual_seed(0)
    assert_parity(nn.Linear(4, 3), ROWS, loss=loss)


class Annealed(nn.Module):
    """Weighs its penalty by a count of its calls, or by a running mean, outside its buffers."""

    def __init__(self, by_mean: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.by_mean, self.calls, self.mean = by_mean, 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean()
        return y.pow(2).mean() * (self.mean if self.by_mean else self.calls / 1000)


@pytest.mark.parametrize("by_mean", [False, True])
def test_what_a_model_keeps_outside_its_buffers_is_refused(by_mean: bool, tmp_path: Path) -> None:
    model = nn.Sequential(Annealed(by_mean))
    with pytest.raises(export.ExportError, match=r"0.calls, 0.mean changed.*register_buffer"):
        export.train_step(
            model, lambda model, batch: model(batch["x"]), ROWS, optimizer=export.Sgd(lr=0.1),
            dynamic={}, directory=tmp_path / "a",
        )  # fmt: skip
    assert model[0].calls == 0


class Cancelling(nn.Module):
    """Its loss is what is left of two larger numbers: one of the loss and a sum without it."""

    def __init__(self, remembers: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.remembers, self.calls, self.mean = remembers, 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.mean.mul_(0.5).add_(y.detach().mean())
        in_rows, self.calls = self.calls % 2 == 1, self.calls + 1
        terms = torch.cat([10 + y.flatten(), -10 - 0.999 * y.flatten()])
        remembered = {
            "nothing": 0.0,
            "a count": self.calls,
            "a mean": self.mean,
            "every third call": self.calls % 3 == 1,
        }[self.remembers]
        return (terms.view(9, 4).sum(0) if in_rows else terms).sum() + 0.01 * remembered


@pytest.mark.parametrize("remembers", ["nothing", "a count", "a mean", "every third call"])
def test_rounding_of_a_loss_near_zero_is_no_memory(remembers: str, tmp_path: Path) -> None:
    """Sums in another order differ by far more than the last digits of such a loss."""
    torch.manual_seed(0)
    model = Cancelling(remembers)
    refused = pytest.raises(export.ExportError, match="register_buffer")
    with nullcontext() if remembers == "nothing" else refused:
        export.train_step(
            model, lambda model, batch: model(batch["x"]), ROWS, optimizer=export.Sgd(lr=0.1),
            dynamic={}, directory=tmp_path / "a",
        )  # fmt: skip


@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(3), nn.GroupNorm(3, 3, affine=False), nn.LayerNorm(4, bias=False)]
)
def test_an_activation_in_place_behind_a_norm(
    norm: nn.Module, assert_parity: Callable[..., export.Exported]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 6, 6)
    assert_parity(nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.LeakyReLU(0.2, True)), {"x": x})


class Overwritten(nn.Module):
    """Keeps what it saw last, and nothing of what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("where", torch.zeros((), dtype=torch.int64))


def test_buffers_that_are_overwritten_whole(tmp_path: Path) -> None:
    def loss(model: Overwritten, batch: dict[str, Tensor]) -> Tensor:
        found = model.layer(batch["x"]).square().mean()
        model.last.copy_(found.detach())
        model.where.copy_(batch["x"].argmax())
        return found

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    export.train_step(
        Overwritten(),
        loss,
        {"x": x},
        optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}},
        directory=tmp_path / "artifact",
    )
    trainer = Trainer(tmp_path / "artifact")
    for _ in range(3):
        told = trainer.step({"x": x.numpy()})
        assert trainer.buffers["last"] == np.float32(told)
        assert trainer.buffers["where"] == x.argmax().item()
