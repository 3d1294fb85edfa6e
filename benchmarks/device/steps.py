"""Our side of a workload: its artifact and its Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

import export
from benchmarks.device.workloads import Batch, Workload
from device_sdk import Trainer


def exported(workload: Workload, model: nn.Module, batch: Batch, folder: Path) -> export.Exported:
    """The workload's artifact, verified beside torch."""
    optimizer: export.Optimizer
    if workload.optimizer == "adam":
        optimizer = export.Adam(1e-3)
    else:
        optimizer = export.Sgd(1e-3, momentum=0.0 if "BPR" in workload.name else 0.9)
    return export.train_step(
        model,
        workload.loss,
        batch,
        optimizer=optimizer,
        dynamic=workload.dynamic,
        directory=folder,
    )


def our_step(folder: Path, batch: Batch, providers: str = "cpu") -> Callable[[], float]:
    """One step of the artifact with one thread."""
    trainer = Trainer(folder, providers=providers, threads=1)
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    return lambda: trainer.step(arrays)
