"""What does federation bring? Two fleets of 40 devices over a real broker, with control arms.

Scikit-learn's handwritten digits. In the first fleet every device has some of all ten; in the
second it has two digits of its own, which it learns as well by itself. Half of the devices train
a second model alone; what ``status`` and ``evaluations`` then say is printed, and drawn.

    python -m examples.what_it_brings [FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import export
from aggregator.cli import main as aggregator
from aggregator.demo.fleet import FleetMember, FleetTask, local_fleet
from device_sdk import LocalData
from device_sdk.system.command_line import print_any_text

DEVICES, CLASSES, ROUNDS = 40, 10, 12
_HELD_OUT = 1 / 3


def all_digits(rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """Rows of the digits by device, at random."""
    return np.array_split(rng.permutation(len(load_digits().target)), DEVICES)


def two_digits(rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """Two digits for each device, and its share of their rows."""
    target = load_digits().target
    shares = {
        digit: iter(np.array_split(rng.permutation(np.flatnonzero(target == digit)), 8))
        for digit in range(CLASSES)
    }
    pairs = [
        (place % CLASSES, (place + 1 + place // CLASSES) % CLASSES) for place in range(DEVICES)
    ]
    return [np.concatenate([next(shares[digit]) for digit in pair]) for pair in pairs]


def members(rows: Sequence[np.ndarray[Any, Any]]) -> list[FleetMember]:
    """Devices with these rows, a third of them held back."""
    digits = load_digits()
    x, label = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    return [
        FleetMember(
            f"device-{place:02}", LocalData({"x": x[own], "label": label[own]}, holdout=_HELD_OUT)
        )
        for place, own in enumerate(rows)
    ]


def write_artifact(folder: Path) -> None:
    """A network of one hidden layer."""

    def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        logits = model(batch["x"])
        return export.losses.cross_entropy(logits, batch["label"]), {"logits": logits}

    torch.manual_seed(0)
    export.train_step(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES)),
        loss,
        {"x": torch.rand(8, 64), "label": torch.arange(8)},
        optimizer=export.Sgd(lr=0.2),
        dynamic={name: {0: "batch"} for name in ("x", "label")},
        metrics={"accuracy": ("logits", "label")},
        directory=folder,
    )


def run(name: str, rows: Sequence[np.ndarray[Any, Any]], artifact: Path, folder: Path) -> Path:
    """Let a fleet with these rows learn; its aggregator's home."""
    task = FleetTask(
        "fedavg",
        [artifact],
        rounds=ROUNDS,
        settings={"training": {"epochs": 3, "batch_size": 8}},
        evaluation={"control": 0.5},
    )
    print(f"\n{name}: {DEVICES} devices, {ROUNDS} rounds")
    with local_fleet(task, members(rows), folder) as fleet:
        for row in fleet.rounds():
            print(f"round {row.round} closed", flush=True)
        fleet.settle()
    return folder / "aggregator"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both fleets; returns the exit status."""
    print_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m examples.what_it_brings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, nargs="?", help="for homes, logs and pictures")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="what-it-brings-"))
    rng = np.random.default_rng(0)
    write_artifact(folder / "artifact")
    for name, deal in (("all-digits", all_digits), ("two-digits", two_digits)):
        home = str(run(name, deal(rng), folder / "artifact", folder / name))
        aggregator(["status", "--home", home])
        picture = folder / f"{name}.png"
        versions = ["--versions", str(ROUNDS)]
        aggregator(["evaluations", "--home", home, *versions, "--picture", str(picture)])
        print(f"{picture} shows it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
