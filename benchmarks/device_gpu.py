"""Parity and speed on a GPU: every workload's graph on the CUDA provider, against torch CUDA eager.

Run with `python -m benchmarks.device_gpu` where onnxruntime-gpu and a CUDA build of torch are
installed. Says so and stops where no CUDA provider is to be had.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime
import torch
from tabulate import tabulate

from benchmarks.device.timing import alternately, exported
from benchmarks.device.workloads import Workload, torch_step, workloads
from device_sdk import Trainer

TIMED = ("BPR, 3,706 rows, 100 triples, k = 64", "LeNet", "ResNet-18")
TOLERANCE = 2e-3
"""Relative error of an update against the CPU provider's; convolutions add in another order."""


def main() -> int:
    """Print the table; 1 where an update differs, 2 where there is no GPU."""
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        print("no CUDA provider in this onnxruntime: nothing to measure", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing to compare with", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    rows = [_row(_larger(workload)) for workload in workloads()]
    print(tabulate(rows, headers="keys"))
    return int(any(row["update error"] > TOLERANCE for row in rows))


def _larger(workload: Workload) -> Workload:
    if not workload.name.startswith("ResNet"):
        return workload

    def batch() -> dict[str, torch.Tensor]:
        return {"x": torch.randn(64, 3, 64, 64), "y": torch.randint(10, (64,))}

    return replace(workload, name="ResNet-18, 3 x 64 x 64, batch 64", batch=batch)


def _row(workload: Workload) -> dict[str, object]:
    print(f"{workload.name} ...", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    model, batch = workload.model(), workload.batch()
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "artifact"
        exported(workload, model, batch, folder)
        on_cpu = Trainer(folder, providers="cpu")
        on_gpu = Trainer(folder, providers="cuda")
        before = on_cpu.parameters
        on_cpu.step(arrays)
        on_gpu.step(arrays)
        error = _update_error(before, on_cpu.parameters, on_gpu.parameters)
        row: dict[str, object] = {"work": workload.name, "update error": error}
        if workload.name.startswith(TIMED):
            theirs = model.cuda()
            moved = {name: tensor.cuda() for name, tensor in batch.items()}
            timed = alternately(
                [lambda: on_gpu.step(arrays), torch_step(workload, theirs, moved)], seconds=8
            )
            row["tessera ms"] = timed.medians[0] * 1e3
            row["torch ms"] = timed.medians[1] * 1e3
            row["times torch"] = timed.ratio(0, 1)
    return row


def _update_error(
    before: dict[str, np.ndarray], one: dict[str, np.ndarray], other: dict[str, np.ndarray]
) -> float:
    """L2 error of all updates together, relative to the first's."""
    gap = sum(float(((one[n] - other[n]) ** 2).sum()) for n in before)
    size = sum(float(((one[n] - before[n]) ** 2).sum()) for n in before)
    return float((gap / max(size, 1e-30)) ** 0.5)


if __name__ == "__main__":
    sys.exit(main())
