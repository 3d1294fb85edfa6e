"""Graphs with fewer nodes compute the same bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import export
import export.convert
from benchmarks.device.workloads import Workload, workloads
from device_sdk import Trainer

CLICKS, NORMALISED = (
    next(w for w in workloads() if w.name.startswith(name)) for name in ("CTR", "BatchNorm")
)


def _exported(workload: Workload, folder: Path) -> Path:
    torch.manual_seed(0)
    return export.train_step(
        workload.model(),
        workload.loss,
        workload.batch(),
        optimizer=export.Adam(),
        dynamic=workload.dynamic,
        directory=folder,
        verify=False,
    ).directory


def _operators(folder: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(folder / "train.onnx").graph.node)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workload", [CLICKS, NORMALISED], ids=lambda workload: workload.name)
def test_fewer_nodes_give_the_same_bits(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = _exported(workload, tmp_path / "fewer")
    monkeypatch.setattr(export.convert, "simplify", lambda graph, outputs: dict(outputs))
    plain = _exported(workload, tmp_path / "plain")
    batch = {name: tensor.numpy() for name, tensor in workload.batch().items()}
    after = []
    for folder in (fewer, plain):
        trainer = Trainer(folder, providers="cpu", threads=1)
        losses = [trainer.step(batch) for _ in range(3)]
        after.append({**trainer.state, "losses": np.asarray(losses)})
    assert after[0].keys() == after[1].keys()
    for name, value in after[0].items():
        np.testing.assert_array_equal(value, after[1][name], err_msg=name)
    assert _operators(fewer).total() < _operators(plain).total() - 10


def test_buffers_that_change_alike_change_as_one_vector(tmp_path: Path) -> None:
    operators = _operators(_exported(NORMALISED, tmp_path / "artifact"))
    # One Split of the parameters and one Concat of their gradients; one Concat of statistics.
    assert operators["Split"] == 1
    assert operators["Concat"] == 2


def _rearranged(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.cat(x.chunk(2, 1), 0),
        torch.cat(x.chunk(2, 0), 1),
        torch.cat([part.reshape(-1) for part in x.chunk(2, 1)]),
        torch.cat([part.unsqueeze(1) for part in x.chunk(2, 0)], 1),
        x.unsqueeze(1).repeat(1, 3, 1),
    ]


def test_parts_joined_otherwise_than_they_were_cut_are_moved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 6)
    weights = [torch.randn(tensor.numel()) for tensor in _rearranged(torch.zeros(4, 6))]
    batch = {"x": torch.randn(4, 6)}

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = _rearranged(model(batch["x"]))
        return torch.stack(
            [part.reshape(-1).tanh() @ w for part, w in zip(parts, weights, strict=True)]
        ).sum()

    folder = export.train_step(
        model, loss, batch, optimizer=export.Sgd(lr=1.0), dynamic={}, directory=tmp_path / "a"
    ).directory
    trainer = Trainer(folder, providers="cpu", threads=1)
    expected = loss(model, batch)
    (gradient,) = torch.autograd.grad(expected, [model.weight])
    assert trainer.step({"x": batch["x"].numpy()}) == pytest.approx(expected.item(), rel=1e-4)
    moved = (model.weight - gradient).detach().numpy()
    np.testing.assert_allclose(trainer.parameters["weight"], moved, rtol=1e-3, atol=1e-5)
