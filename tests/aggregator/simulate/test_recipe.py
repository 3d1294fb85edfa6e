"""Devices with a few rows of a table learn by the defaults, and what those are is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import export
from aggregator.cli import main
from aggregator.simulate.recipe import in_one_pass, training_of
from aggregator.task.file import read_task
from device_sdk import LocalData
from device_sdk.artifact.manifest import Manifest

DEVICES, ROWS = 12, 40


def tables(devices: int, rng: np.random.Generator) -> list[LocalData]:
    """Tumours as they were measured, 40 to a device; the others test on every device."""
    table = load_breast_cancer()
    order = rng.permutation(len(table.target))
    x, label = table.data[order].astype(np.float32), table.target[order].astype(np.int64)
    test = {"x": x[devices * ROWS :], "label": label[devices * ROWS :]}
    parts = [slice(place * ROWS, (place + 1) * ROWS) for place in range(devices)]
    return [LocalData({"x": x[own], "label": label[own]}, test=test) for own in parts]


def loss(model: nn.Module, batch: dict[str, Any]) -> Any:
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits, batch["label"]), {"logits": logits}


def write(folder: Path, optimizer: export.Optimizer | None = None) -> Manifest:
    torch.manual_seed(0)
    rows = tables(1, np.random.default_rng(0))[0].train
    return export.train_step(
        nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2)),
        loss,
        {name: torch.tensor(array[:32]) for name, array in rows.items()},
        optimizer=optimizer,
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        metrics={"accuracy": ("logits", "label")},
        directory=folder,
        verify=False,
    ).manifest


def played(folder: Path, training: str, capsys: pytest.CaptureFixture[str]) -> tuple[float, str]:
    """Accuracy after five rounds, and what the command said."""
    file = folder / "task.toml"
    file.write_text(
        f'[task]\nmethod = "fedavg"\nartifact = "net"\n{training}'
        '[round]\nquorum = 1\n[evaluation]\nbest_by = "accuracy"\n'
    )
    command = ["simulate", str(file), "--data", f"{__file__}:tables", "--out", str(folder / "runs")]
    assert main([*command, "--devices", str(DEVICES), "--rounds", "5"]) == 0
    (run,) = json.loads(max((folder / "runs").glob("*.json")).read_text())["runs"]
    found = [each["value"] for each in run["newest"]["figures"] if each["metric"] == "accuracy"]
    return float(found[0]), capsys.readouterr().out


def test_averaging_leaves_the_commonest_class_of_small_tables_in_five_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = write(tmp_path / "net")
    assert found.rate_by_trial
    right, said = played(tmp_path, "", capsys)
    commonest = 0.63
    assert right > commonest + 0.2
    rate = f"at the artifact's rate of {found.rate:g} (found by its export's trial)"
    recipe = f"net trains in steps of 32 samples, as many passes as 30 steps take, {rate}"
    assert recipe in said


def test_what_a_task_says_of_passes_and_rate_is_kept_to_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "net", export.Sgd(lr=0.5))
    given = "[fedavg.training]\nepochs = 1\nbatch_size = 0\nlearning_rate = 1e-6\n"
    right, said = played(tmp_path, given, capsys)
    assert right < 0.75
    assert "net trains in steps of all samples, 1 pass, at a rate of 1e-06" in said
    task = read_task(tmp_path / "task.toml")
    assert in_one_pass(task) is task
    capsys.readouterr()
    _, said = played(tmp_path, "[fedavg.training]\nlearning_rate = 0\n", capsys)
    assert "at the artifact's rate of 0.5 (its author's)" in said
    short: Any = training_of(in_one_pass(read_task(tmp_path / "task.toml")))
    assert short.epochs == 1
