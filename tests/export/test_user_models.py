"""Models as their authors write them: constants, buffers, writes in place, reparametrisations.

Each is exported (verified against float64 torch) and then trained on the device's runtime beside
plain torch, which shares no code with the exporter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import export
from device_sdk import Trainer

ROWS = 6


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _mean_square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(*batch.values())
    pattern = torch.linspace(-1, 1, output[0].numel()).reshape(output.shape[1:])
    return (output * pattern + 0.1 * output * output).mean()


def _trains_as_torch_does(
    model: nn.Module, batch: dict[str, Tensor], directory: Path, *, loss: Any = _mean_square
) -> export.Exported:
    exported = export.train_step(
        model,
        loss,
        batch,
        optimizer=export.Sgd(0.1),
        dynamic={name: {0: "batch"} for name in batch},
        directory=directory / "artifact",
    )
    trainer = Trainer(exported.directory)
    own, loss = copy.deepcopy((model.train(), loss))
    optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.1)
    for rows in (3, 2, ROWS):
        part = {name: tensor[:rows] for name, tensor in batch.items()}
        optimizer.zero_grad()
        expected = loss(own, {name: tensor.clone() for name, tensor in part.items()})
        expected.backward()
        optimizer.step()
        got = trainer.step({name: tensor.numpy() for name, tensor in part.items()})
        assert got == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-5)
        wanted = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        for name, value in {**trainer.parameters, **trainer.buffers}.items():
            want = wanted[name].detach().numpy()
            np.testing.assert_allclose(value, want, rtol=2e-4, atol=1e-5, err_msg=name)
    return exported


class RunningBuffers(nn.Module):
    """Buffers written in place, set anew, and not saved; a float64 and two whole-number ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("last", torch.zeros(6), persistent=False)
        self.register_buffer("wide", torch.linspace(0, 1, 6, dtype=torch.float64))
        self.register_buffer("index", torch.arange(6, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)  # type: ignore[operator]
                self.scale = self.scale * 0.9 + h.detach().mean(0) * 0.1
                self.last.copy_(h.max(0).values)  # type: ignore[operator]
        wide = (h.double() * self.wide).float()
        return (h - self.mean) * self.scale + wide + self.index * h + self.count.float() * 0.01


class Constants(nn.Module):
    """Tensors that the model makes, or holds without registering them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.weight = _numbers(6, 6)
        self.factor = 2.5

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        h = self.linear(x) @ self.weight * self.factor
        h = h + torch.tensor([1.0, 2, 3, 4, 5, 6]) + torch.zeros(x.shape[0], 6) @ self.weight
        h = h + torch.from_numpy(np.linspace(0, 1, 6)).float() + torch.as_tensor(3)
        h = h + functional.relu(image.long() - 100)
        self.seen = h
        return self.linear(h * 0.1) + self.linear(image.float() / 255)


class Writes(nn.Module):
    """Writes through views: by column, by slice, by mask, and with circular padding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        y = torch.zeros_like(h)
        y[:, 1:3] = h[:, 3:5]
        y[:, 0] += 1
        y[:, -1] = h[:, 0] * 2
        y[h > 0.5] = 0.25
        z = functional.pad(h[:, None], (2, 1), mode="circular")[:, 0]
        return torch.cat([y * h, z], 1)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.second = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(self.first, x, use_reentrant=False)
        result: Tensor = self.second(h)
        return result


class PlainAverage(nn.Module):
    """Batch norm with momentum=None, behind one that forward itself puts in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.frozen = nn.BatchNorm1d(6)
        self.average = nn.BatchNorm1d(6, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        self.frozen.eval()
        result: Tensor = self.average(torch.tanh(self.frozen(self.linear(x))))
        return result


class Masked(nn.Module):
    """Attention where one query of one sample may look at nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        h = self.linear(x)
        keys = h[:, None] * torch.linspace(0.5, 2, 4)[:, None]
        mask = seen[:, None].expand(-1, 2, -1)
        return functional.scaled_dot_product_attention(
            torch.stack([h, -h], 1), keys, keys.tanh(), attn_mask=mask
        )


class HeldAttention(nn.Module):
    """Attention by a function that was imported before the export, in several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.linear(x).reshape(-1, 3, 2, 2, 2).unbind(1)
        return scaled_dot_product_attention(query, key, value, is_causal=True)


class LargeNames(nn.Module):
    """Large parameters named as the exporter names state, beside small, empty and unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(_numbers(300, 300) * 0.01)
        self.step = nn.Parameter(_numbers(300, 300) * 0.01)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(_numbers(3))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + (x @ self.packed[:6])[:, :6] * self.step[0, :6]


class Shared(nn.Module):
    """A layer under two names, a weight and a buffer that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = nn.ModuleList([self.first, nn.Linear(6, 6)])
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.again[1].weight
        self.register_buffer("count", torch.zeros(6))
        self.last.register_buffer("seen", self.count)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.again[0](self.first(x)))
        self.last.seen.add_(h.detach().mean(0))  # type: ignore[operator]
        result: Tensor = self.last(self.again[1](h)) + self.count
        return result


def _spectral(normalise: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(normalise(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))


class WrittenVariance(nn.Module):
    """A write through a view beside what torch breaks into operators that may return views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)[:, :, None] * x[:, None]
        y = torch.zeros_like(h)
        y[:, 0] = h.var(1)
        return functional.pad(y + h, (1, 2, 0, 1), mode="replicate")


class ViewedState(nn.Module):
    """The last state of a recurrent layer, viewed in the order that torch has it in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(1, 5)

    def forward(self, x: Tensor) -> Tensor:
        _, h = self.recurrent(x.t().unsqueeze(2))
        return h.squeeze(0).view(-1, 5)


class OnAGraph(nn.Module):
    """Convolutions over constant sparse adjacencies, one of them a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Embedding(300, 4)
        places = torch.randint(300, (2, 900), generator=torch.Generator().manual_seed(1))
        self.register_buffer("wide", torch.sparse_coo_tensor(places, _numbers(900), (300, 300)))
        self.small = (_numbers(300, 300)[:6] > 1.5).float().to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        once = torch.sparse.mm(self.wide, self.nodes.weight)
        return x @ (self.small @ torch.tanh(once) + (self.wide @ once)[:6])


SEEN = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]] * 2, dtype=torch.bool)
IMAGE = torch.randint(0, 256, (ROWS, 6), dtype=torch.uint8)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "buffers": (RunningBuffers, {}),
    "constants": (Constants, {"image": IMAGE}),
    "writes": (Writes, {}),
    "checkpoint": (Recomputed, {}),
    "plain average": (PlainAverage, {}),
    "masked attention": (Masked, {"seen": SEEN}),
    "held attention": (HeldAttention, {}),
    "large names": (LargeNames, {}),
    "shared": (Shared, {}),
    "weight norm": (lambda: _spectral(parametrizations.weight_norm), {}),
    "written variance": (WrittenVariance, {}),
    "viewed state": (ViewedState, {}),
    "on a graph": (OnAGraph, {}),
    "spectral norm": (lambda: _spectral(parametrizations.spectral_norm), {}),
    "old spectral norm": (lambda: _spectral(torch.nn.utils.spectral_norm), {}),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_torch_does(name: str, tmp_path: Path) -> None:
    make, more = MODELS[name]
    torch.manual_seed(0)
    model = make()
    attributes = {key: set(module.__dict__) for key, module in model.named_modules()}
    held = {key: id(tensor) for key, tensor in model.named_parameters(remove_duplicate=False)}
    exported = _trains_as_torch_does(model, {"x": _numbers(ROWS, 6), **more}, tmp_path)
    assert {key: set(m.__dict__) for key, m in model.named_modules()} == attributes
    assert {k: id(t) for k, t in model.named_parameters(remove_duplicate=False)} == held
    assert "comparisons with torch; the worst" in repr(exported)
    assert exported.report is not None
    assert exported.report.unmoved == (("unused", "empty") if name == "large names" else ())


def test_initial_states_and_images_in_integers(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Conv2d(2, 4, 3)
            self.recurrent = nn.GRU(4, 5, batch_first=True)

        def forward(self, image: Tensor) -> Tensor:
            h = torch.relu(self.filters(image.float() / 255)).flatten(2).transpose(1, 2)
            return self.recurrent(h, torch.zeros(1, image.size(0), 5))[1][0]

    torch.manual_seed(0)
    image = torch.randint(0, 256, (ROWS, 2, 5, 5), dtype=torch.uint8)
    _trains_as_torch_does(Model(), {"image": image}, tmp_path)


def test_loss_in_double_and_outputs_that_are_inputs_or_constants(tmp_path: Path) -> None:
    model = nn.Linear(6, 2)
    exported = export.train_step(
        model,
        lambda m, b: (
            m(b["x"]).double().pow(2).mean(),
            {"x": b["x"], "again": b["x"], "one": torch.ones(3), "weight": m.weight},
        ),
        {"x": _numbers(ROWS, 6)},
        optimizer=export.Sgd(0.1),
        dynamic={"x": {0: "batch"}},
        directory=tmp_path / "artifact",
    )
    trainer = Trainer(exported.directory)
    trainer.step({"x": _numbers(4, 6).numpy()})
    np.testing.assert_array_equal(trainer.outputs["again"], _numbers(4, 6).numpy())
    np.testing.assert_array_equal(trainer.outputs["one"], np.ones(3, np.float32))


@pytest.mark.parametrize("positions", [5, ROWS])
def test_a_parameter_may_have_the_name_of_a_batch_entry(positions: int, tmp_path: Path) -> None:
    """What ``dynamic`` says of the entry is not said of the parameter."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos = nn.Parameter(0.1 * _numbers(positions, 3))
            self.last = nn.Linear(3, 2)

        def forward(self, x: Tensor, pos: Tensor) -> Tensor:
            y: Tensor = self.last(torch.tanh(x + self.pos[: x.shape[1]])) + pos
            return y

    batch = {"x": _numbers(ROWS, positions, 3), "pos": _numbers(ROWS, positions, 2)}
    exported = _trains_as_torch_does(Model(), batch, tmp_path)
    assert all("batch" not in tensor.shape for tensor in exported.manifest.state)


def test_parameters_may_be_kept_from_before(tmp_path: Path) -> None:
    """In the model's own lists (deepctr-torch's regularisation), a closure, or a tied weight."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
            self.last = nn.Linear(6, 6)
            self.last.weight = self.first.weight
            self.penalised = [(list(self.parameters()), 0.1)]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
            return y

    class Penalised:
        def __init__(self, model: Model) -> None:
            self.kept, self.norm = list(model.parameters()), model.norm

        def __call__(self, m: nn.Module, b: dict[str, Tensor]) -> Tensor:
            assert isinstance(m, Model)
            penalty = sum(w * p.pow(2).sum() for group, w in m.penalised for p in group)
            stacked = torch.stack([p.abs().sum() for p in self.kept]).sum()
            again = self.norm(b["x"]).pow(2).mean()
            return m(b["x"]).pow(2).mean() + penalty + 0.1 * stacked + again

    torch.manual_seed(0)
    model = Model()
    _trains_as_torch_does(model, {"x": _numbers(ROWS, 6)}, tmp_path, loss=Penalised(model))


def test_views_kept_from_before_are_refused(tmp_path: Path) -> None:
    """They would be constants of the graph, in the exporter's own reference as well."""
    model = nn.Linear(6, 2)
    kept = model.weight.t()

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return m(b["x"]).pow(2).mean() + 0.1 * kept.pow(2).sum()

    with pytest.raises(export.ExportError, match="'weight' is used as a constant"):
        _trains_as_torch_does(model, {"x": _numbers(ROWS, 6)}, tmp_path, loss=loss)


def test_dropout_masks_survive_checkpointing(tmp_path: Path) -> None:
    """A mask drawn anew in the backward pass would give other gradients than the same model's."""

    def model(recompute: bool) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))

            def forward(self, x: Tensor) -> Tensor:
                if not recompute:
                    return self.body(x)
                return checkpoint(self.body, x, use_reentrant=False)

        torch.manual_seed(0)
        return Model()

    weights = []
    for recompute in (False, True):
        exported = export.train_step(
            model(recompute),
            _mean_square,
            {"x": _numbers(ROWS, 6)},
            optimizer=export.Sgd(0.1),
            dynamic={"x": {0: "batch"}},
            directory=tmp_path / str(recompute),
        )
        trainer = Trainer(exported.directory, seed=3)
        for _ in range(2):
            trainer.step({"x": _numbers(ROWS, 6).numpy()})
        weights.append(trainer.parameters["body.0.weight"])
    np.testing.assert_array_equal(weights[0], weights[1])


def test_what_torch_does_not_copy_with_a_module(assert_parity: Any) -> None:
    """A weight that a hook makes, and a matrix held by rows."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.utils.weight_norm(nn.Conv1d(1, 4, 3))
            self.rows = (_numbers(6, 4) > 0).float().to_sparse_csr()

        def forward(self, x: Tensor) -> Tensor:
            return (self.rows @ self.first(x.unsqueeze(1)).mean(2).T).T

    assert_parity(Model(), {"x": _numbers(ROWS, 6)})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("loss", "refused"),
    [
        (lambda h, y: functional.mse_loss(h.squeeze(), y), False),
        (lambda h, y: functional.binary_cross_entropy_with_logits(h.squeeze(), y.sigmoid()), False),
        (lambda h, y: (h.expand(-1, 3).squeeze().softmax(0) ** 2).sum() * y.sum(), True),
        (lambda h, y: (h[: y.shape[0] // 2, :].expand(-1, 3).squeeze().mean(0) ** 2).sum(), True),
    ],
)
def test_an_axis_that_squeeze_drops_at_size_one(loss: Any, refused: bool, tmp_path: Path) -> None:
    """Refused only where torch, with an axis less, computes something else."""

    def run(m: nn.Module, b: dict[str, Tensor]) -> Any:
        h = m(b["x"])
        return loss(h, b["y"]), {"score": h.squeeze()}

    batch = {"x": _numbers(ROWS, 6), "y": _numbers(ROWS)}
    given = {"dynamic": {"x": {0: "batch"}, "y": {0: "batch"}}, "optimizer": export.Sgd(0.1)}
    model = nn.Linear(6, 1)
    if not refused:
        export.train_step(model, run, batch, directory=tmp_path / "a", **given)
        return
    with pytest.raises(export.ExportError, match=r"squeeze\(\) drops axis 'batch'.*squeeze\(-1\)"):
        export.train_step(model, run, batch, directory=tmp_path / "a", **given)
