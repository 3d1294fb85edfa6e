"""Ladders for the methods whose devices each keep a model of their own, and samples for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import export
from device_sdk.local_data import LocalData
from export.build import Exported
from export.losses import (
    PENALTY,
    distillation,
    example_prototypes,
    example_teachers,
    prototype_alignment,
)
from export.models.mutual import DYNAMIC, mutual_losses

FEATURES, WIDTH, CLASSES = 20, 32, 3
TRAINING = {
    "mutual": f"classes = {CLASSES}\nlocal_steps = 6\nbatch_size = 10",
    "prototypes": f"classes = {CLASSES}\nwidth = {WIDTH}\nepochs = 2\nbatch_size = 10",
    "teacher_logits": f"classes = {CLASSES}\nepochs = 2\nbatch_size = 10",
}
"""By method, the settings of a task's devices."""


class Net(nn.Module):
    """An embedding with a norm over the batch, and a head."""

    def __init__(self, hidden: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.inner = nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.embedded(x))
        return found

    def embedded(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(torch.relu(self.norm(self.stem(x)))))


def embedded(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model.embedded(batch["x"]), model(batch["x"])


def predicted(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    embedding, logits = embedded(model, batch)
    return {"embedding": embedding, "probabilities": torch.softmax(logits, -1)}


def write_ladder(
    method: str, directory: Path, model: nn.Module | Callable[[int], nn.Module], **sizes: Any
) -> list[Exported]:
    """For one of the methods; ``sizes``: the ladder's ``ranks`` or ``widths``."""
    given = samples(99, 6)
    x, label = torch.from_numpy(given["x"]), torch.from_numpy(given["label"])
    more: dict[str, Any] = {
        "loss": prototype_alignment(embedded),
        "example_batch": {"x": x, "label": label, **example_prototypes(CLASSES, WIDTH)},
    }
    if method == "teacher_logits":
        more = {
            "loss": distillation(lambda model, batch: model(batch["x"])),
            "example_batch": {"x": x, "label": label, **example_teachers(CLASSES)},
            "gradient": PENALTY,
        }
    if method == "mutual":
        teacher = torch.softmax(torch.randn(6, CLASSES), -1)
        batch = {"x": x, "y": label, "x_pub": x - 1, "y_pub": label, "teacher": teacher}
        scalars = ("weight_local", "weight_public", "project", "weight_kl", "weight_ce")
        batch |= {"confidence": torch.rand(6), **{name: torch.tensor(1.0) for name in scalars}}
        more = {"loss": mutual_losses, "example_batch": batch}
        more["gradient"] = export.ConflictProjection()
    usual = {name: {0: "batch"} for name in ("x", "label")}
    return export.submodels(
        model, optimizer=export.Sgd(lr=0.1), predict=predicted, directory=directory, verify=False,
        dynamic=DYNAMIC if method == "mutual" else usual, **more, **sizes,
    )  # fmt: skip


def samples(seed: int, count: int = 40, features: int = FEATURES) -> dict[str, np.ndarray]:
    """Of classes that a direction in the features tells apart."""
    rng = np.random.default_rng(seed)
    label = rng.integers(CLASSES, size=count)
    directions = 2 * np.random.default_rng(0).standard_normal((CLASSES, features))
    x = directions[label] + rng.standard_normal((count, features))
    return {"x": x.astype(np.float32), "label": label}


def shown(seed: int) -> LocalData:
    """As mutual learning calls them, some of which the device shows to the others."""
    found = [samples(seed), samples(100 + seed, 8)]
    return LocalData(*({"x": each["x"], "y": each["label"]} for each in found))
