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


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_parts_joined_along_another_axis_are_not_the_whole(axis: int, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)

    def joined(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = model(batch["x"])
        heads = torch.cat([part.reshape(-1) for part in rows.split(2, dim=-1)])
        return torch.cat([torch.cat(rows.split(2, dim=1), dim=axis).reshape(-1), heads])

    folder = export.train_step(
        model,
        lambda model, batch: joined(model, batch).pow(2).mean(),
        {"x": torch.randn(3, 4, 4)},
        optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}},
        predict=lambda model, batch: {"joined": joined(model, batch)},
        directory=tmp_path,
        verify=False,
    ).directory
    batch = {"x": torch.randn(5, 4, 4)}
    ours = Trainer(folder, providers="cpu", threads=1).predict({"x": batch["x"].numpy()})
    np.testing.assert_allclose(ours["joined"], joined(model, batch).detach(), atol=1e-6)
