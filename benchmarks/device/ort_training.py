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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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


def environment() -> Path | None:
    """The environment's Python, made on first use (a minute or two); None where it cannot be."""
    python = FOLDER / "bin" / "python"
    if (FOLDER / ".installed").exists():
        return python
    print(f"making {FOLDER.name} for onnxruntime-training ...", file=sys.stderr, flush=True)
    try:
        venv.create(FOLDER, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"onnxruntime-training cannot be installed here: {error}", file=sys.stderr)
        return None
    (FOLDER / ".installed").touch()
    return python


def one_run(python: Path, names: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """For each row ``against_torch``, or ``error``, which says why there is no figure."""
    for name in names:
        done = subprocess.run(
            [python, "-m", "benchmarks.device.ort_training_peer", name, str(seconds)],
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
