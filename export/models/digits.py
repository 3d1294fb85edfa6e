"""The demo's ladder: a small convolutional network for handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from export.build import Exported
from export.ladder import submodels
from export.models.images import classification
from export.optimizers import Adam

RANKS = (1 / 16, 1 / 4, 1 / 2, 1)


def digits_network(seed: int = 0) -> nn.Module:
    """Three convolutions and a linear layer: [b, 1, 8, 8] to the logits of ten digits, [b, 10].

    ``seed`` draws the initial weights and leaves torch's generator as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 160, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(160, 224, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 224, 10),
        )  # fmt: skip


def export_digits(directory: str | Path, *, verify: bool = True) -> list[Exported]:
    """Write the ladder of the four :data:`RANKS`, smallest first, to train with Adam."""
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.rand(8, 1, 8, 8, generator=generator), "y": torch.arange(8)}
    return submodels(
        digits_network(),
        classification,
        batch,
        ranks=RANKS,
        optimizer=Adam(lr=0.003),
        dynamic={"x": {0: "batch"}, "y": {0: "batch"}},
        metrics={"accuracy": ("logits", "y")},
        directory=directory,
        verify=verify,
    )
