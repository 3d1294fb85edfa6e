"""onnxruntime-training 1.19.2, the last release, in an environment of its own.

It needs torch, an old onnx and NumPy 1, so it cannot share a process with us. Both processes time
torch eager beside themselves, and the comparison is the ratio of the two ratios.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.device.workloads import Workload

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


def environment() -> Path:
    """The environment's Python, made on first use (a minute or two)."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / ".installed").exists():
        print(f"making {FOLDER.name} for onnxruntime-training ...", file=sys.stderr, flush=True)
        venv.create(FOLDER, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (FOLDER / ".installed").touch()
    return python


def add_to(rows: list[dict[str, object]], chosen: list[Workload], seconds: float) -> None:
    """Add ``against_ort_training`` to each row, or a word that says why there is no figure."""
    try:
        python = environment()
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"onnxruntime-training cannot be installed here: {error}", file=sys.stderr)
        return
    for row, workload in zip(rows, chosen, strict=True):
        if not workload.peer:
            row["against_ort_training"] = "not expressible"
            continue
        print(f"{workload.name}: onnxruntime-training ...", file=sys.stderr, flush=True)
        done = subprocess.run(
            [python, "-m", "benchmarks.device.ort_training_peer", workload.name, str(seconds)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            print(f"  failed: {reason}", file=sys.stderr)
            row["against_ort_training"] = "fails"
            row["ort_training_error"] = reason
            continue
        figure = json.loads(done.stdout.splitlines()[-1])
        row["ort_training_against_torch"] = figure["against_torch"]
        ours = row["against_torch"]
        assert isinstance(ours, float)
        row["against_ort_training"] = ours / figure["against_torch"]
