"""Three steps of artifacts on this machine, or another that has the device's install alone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from device_sdk import Trainer
from device_sdk.artifact.safetensors import Array

STEPS = 3


def batch_of(artifact: Path) -> Path:
    """Beside an artifact: what it is trained by."""
    return artifact.with_name(f"{artifact.name}.npz")


def state_of(artifact: Path) -> Path:
    """Beside an artifact: the state behind the steps, as the other machine has it."""
    return artifact.with_name(f"{artifact.name}.state")


def opened(artifact: Path) -> Trainer:
    """On one thread, before its first step."""
    return Trainer(artifact, providers="cpu", threads=1)


def walked(trainer: Trainer, artifact: Path) -> dict[str, Array]:
    """The state behind the steps."""
    with np.load(batch_of(artifact)) as file:
        batch = dict(file)
    for _ in range(STEPS):
        trainer.step(batch)
    return dict(trainer.state)


if __name__ == "__main__":
    for batch_file in Path(sys.argv[1]).rglob("*.npz"):
        folder = batch_file.with_suffix("")
        other = opened(folder)
        walked(other, folder)
        other.save(state_of(folder))
