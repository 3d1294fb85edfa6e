"""A process that exports one train step, trains it beside torch, and prints what it found.

    python -m benchmarks.export_survey.exporting NAME FOLDER verified|unverified

Of whatever ``export`` and ``device_sdk`` stand first on the path: another checkout's, perhaps.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx
import torch

import export
from benchmarks.export_survey.compare import compared
from benchmarks.export_survey.steps import subjects
from benchmarks.export_survey.subject import OPTIMIZERS


def main() -> int:
    """Print one line of JSON: what ``survey.Exporting`` holds."""
    name, folder, verified = sys.argv[1:]
    print(json.dumps(_exported(name, Path(folder), verified == "verified")))
    return 0


def _exported(name: str, folder: Path, verify: bool) -> dict[str, object]:
    subject = next(one for one in subjects() if one.name == name)
    found: dict[str, object] = {"verdict": "failed", "said": "", "seconds": 0.0, "nodes": 0}
    torch.set_num_threads(1)
    try:
        step = subject.step()
    except Exception:  # a package whose interface has changed: no fault of the exporter's
        return {**found, "verdict": "not written", "said": traceback.format_exc()}
    start = time.process_time()
    try:
        export.train_step(
            step.model,
            step.loss,
            step.batch,
            optimizer=OPTIMIZERS[step.optimizer].ours(step.model),
            dynamic=step.axes,
            predict=step.predict,
            directory=folder,
            verify=verify,
        )
    except export.ExportError as error:
        return {**found, "verdict": "refused", "said": str(error)}
    except Exception:
        return {**found, "said": traceback.format_exc()}
    found["seconds"] = time.process_time() - start
    found["nodes"] = len(onnx.load(folder / "train.onnx").graph.node)
    np.savez(folder.parent / "batch.npz", **{n: t.numpy() for n, t in step.batch.items()})
    try:
        worst = compared(subject, folder)
    except Exception:
        return {**found, "said": traceback.format_exc()}
    said = (
        f"{worst.tensor} at step {worst.step}: {worst.error:.1e} of its update, "
        f"{worst.allowed:.1e} is allowed"
    )
    return {**found, "verdict": "right" if worst.excess <= 1 else "wrong", "said": said}


if __name__ == "__main__":
    sys.exit(main())
