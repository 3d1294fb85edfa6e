"""Peak resident memory of a process that trains LeNet: ours, and torch's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

_OURS = """
import sys
import numpy as np
from device_sdk import Trainer
trainer = Trainer(sys.argv[1], providers="cpu", threads=1)
rng = np.random.default_rng(0)
batch = {"x": rng.normal(size=(32, 1, 28, 28)).astype(np.float32), "y": rng.integers(0, 10, 32)}
for _ in range(50):
    trainer.step(batch)
assert "torch" not in sys.modules
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""

_TORCH = """
import sys
import torch
torch.set_num_threads(1)
from benchmarks.device.workloads import torch_step, workloads
w = next(w for w in workloads() if w.name.startswith("LeNet"))
step = torch_step(w, w.model(), w.batch())
for _ in range(50):
    step()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_kib(code: str, *arguments: str) -> int:
    """Peak resident KiB of a Python process that runs ``code`` and prints its VmHWM.

    Not ru_maxrss: a child inherits that from the process that starts it.
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1])


def lenet_peaks() -> tuple[float, float]:
    """Peak resident MiB of training LeNet with the device runtime, and with torch."""
    from benchmarks.device.timing import exported
    from benchmarks.device.workloads import workloads

    workload = next(w for w in workloads() if w.name.startswith("LeNet"))
    with tempfile.TemporaryDirectory() as folder:
        exported(workload, workload.model(), workload.batch(), Path(folder) / "lenet")
        ours = peak_kib(_OURS, str(Path(folder) / "lenet"))
    return ours / 1024, peak_kib(_TORCH) / 1024
