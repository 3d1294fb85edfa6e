"""onnxruntime-training 1.19.2, the last release, in an environment of its own.

It needs torch, an old onnx and NumPy 1, so it cannot share a process with us. Both processes time
torch eager beside themselves, and the comparison is the ratio of the two ratios. Its own process is
``python -m benchmarks.device.ort_training NAME SECONDS``.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from benchmarks.device.timing import alternately
from benchmarks.device.workloads import Workload, torch_step, workloads
from benchmarks.harness import environment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-ort-training"
PACKAGES = (
    "onnxruntime-training-cpu==1.19.2",
    "onnx==1.16.2",
    "numpy<2",
    "torch==2.13.0",
    "protobuf<5",
    "setuptools",
    "cerberus",
    "h5py",
)


def python() -> Path | None:
    """The environment's, made on first use (a minute or two); None where it cannot be."""
    try:
        return environment(FOLDER, PACKAGES)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"onnxruntime-training cannot be installed here: {error}", file=sys.stderr)
        return None


def one_run(python: Path, names: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """For each row ``against_torch``, or ``error``, which says why there is no figure."""
    for name in names:
        done = subprocess.run(
            [python, "-m", "benchmarks.device.ort_training", name, str(seconds)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            yield {"work": name, **json.loads(done.stdout.splitlines()[-1])}
        else:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            print(f"{name}: onnxruntime-training fails: {reason}", file=sys.stderr)
            yield {"work": name, "error": reason}


class _Loss(nn.Module):
    """The loss as the forward graph's only output, in operators that its gradient builder has."""

    def __init__(self, workload: Workload, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self._workload = workload
        self._names = names

    def forward(self, *tensors: Tensor) -> Tensor:
        return self._workload.loss(self.model, dict(zip(self._names, tensors, strict=True)))


def _with_statistics(model: onnx.ModelProto) -> onnx.ModelProto:
    """Its gradient builder reads results that torch's exporter leaves out: it is given them."""
    more = {
        "MaxPool": ["indices"],
        "LayerNormalization": ["mean", "inverse"],
        "SoftmaxCrossEntropyLoss": ["log_probability"],
    }
    for index, node in enumerate(model.graph.node):
        for extra in more.get(node.op_type, [])[len(node.output) - 1 :]:
            node.output.append(f"{node.op_type}_{index}_{extra}")
    return model


def main(name: str, seconds: float) -> None:
    """Print the ratio as JSON."""
    from onnxruntime.training import artifacts
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = next(w for w in workloads() if w.name == name)
    model, batch = workload.model(), workload.batch()
    names = list(batch)
    wrapped = _Loss(workload, model, names)
    buffer = io.BytesIO()
    torch.onnx.export(
        wrapped,
        tuple(batch.values()),
        buffer,
        input_names=names,
        output_names=["loss"],
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        opset_version=17,
        dynamo=False,
    )
    forward = _with_statistics(onnx.load_from_string(buffer.getvalue()))
    trained = [f"model.{n}" for n, p in model.named_parameters() if p.requires_grad]
    with tempfile.TemporaryDirectory() as temporary:
        kind = (
            artifacts.OptimType.AdamW if workload.optimizer == "adam" else artifacts.OptimType.SGD
        )
        artifacts.generate_artifacts(
            forward,
            requires_grad=trained,
            frozen_params=[],
            optimizer=kind,
            artifact_directory=temporary,
        )
        folder = Path(temporary)
        state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
        options = __import__("onnxruntime").SessionOptions()
        options.intra_op_num_threads = 1
        module = Module(
            str(folder / "training_model.onnx"), state, device="cpu", session_options=options
        )
        optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
    module.train()
    arrays = [tensor.numpy() for tensor in batch.values()]

    def step() -> float:
        loss = float(module(*arrays))
        optimizer.step()
        module.lazy_reset_grad()
        return loss

    timed = alternately([step, torch_step(workload, model, batch)], seconds=seconds)
    print(json.dumps({"against_torch": timed.ratio(0, 1), "seconds": timed.medians[0]}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
