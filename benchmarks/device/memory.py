"""Peak resident memory of processes that train: ours, and torch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.device.workloads import Batch

_PEAK = """
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
_OURS = f"""
import sys
import numpy as np
from device_sdk import Trainer
trainer = Trainer(sys.argv[1], providers="cpu", threads=1)
batch = dict(np.load(sys.argv[2]))
for _ in range(int(sys.argv[3])):
    trainer.step(batch)
assert "torch" not in sys.modules
{_PEAK}"""
_TORCH = f"""
import sys
from importlib import import_module
import torch
torch.set_num_threads(1)
from benchmarks.device.workloads import torch_step
w = next(w for w in import_module(sys.argv[1]).workloads() if w.name == sys.argv[2])
step = torch_step(w, w.model(), w.batch())
for _ in range(int(sys.argv[3])):
    step()
{_PEAK}"""


def our_peak(artifact: Path, batch: Batch, steps: int) -> float:
    """Peak resident MiB of training so many steps with the device runtime."""
    file = artifact.with_name(f"{artifact.name}-batch.npz")
    np.savez(file, **{name: tensor.numpy() for name, tensor in batch.items()})
    return _peak(_OURS, str(artifact), str(file), str(steps))


def torch_peak(module: str, name: str, steps: int) -> float:
    """The same with torch, of the workload of a name in a module's."""
    return _peak(_TORCH, module, name, str(steps))


def _peak(code: str, *arguments: str) -> float:
    """Not ru_maxrss: a child inherits that from the process that starts it."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1]) / 1024
