"""A convolutional network for 28 x 28 images that a weak device trains in about a millisecond."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from export.build import Exported, export_train_step
from export.models.gru_classifier import DYNAMIC, classification, predicted_classes
from export.optimizers import Optimizer, Sgd


class DigitCnn(nn.Module):
    """[b, 1, 28, 28] float32 to [b, 10] logits; 22,218 parameters.

    Two strided 5 x 5 convolutions of 8 and 16 channels and two linear layers: in the place of
    AlexNet (papers/fedamn, section 4.1), which takes two cores a day there.
    """

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.features = nn.Sequential(
                nn.Conv2d(1, 8, 5, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(8, 16, 5, stride=2, padding=1),
                nn.ReLU(),
            )
            self.classifier = nn.Sequential(nn.Linear(16 * 6 * 6, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def example_digits(*, batch: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """Random ``x`` [b, 1, 28, 28] and ``y`` int64 [b], to trace and verify with."""
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.rand(batch, 1, 28, 28, generator=g),
        "y": torch.randint(10, (batch,), generator=g),
    }


def export_digit_cnn(
    directory: str | Path, *, optimizer: Optimizer | None = None, verify: bool = True
) -> Exported:
    """Write the classifier's artifact: ``Trainer.step({"x": ..., "y": ...})``, any batch size."""
    return export_train_step(
        DigitCnn(),
        classification,
        example_digits(),
        optimizer=optimizer or Sgd(lr=0.05, momentum=0.9),
        dynamic=DYNAMIC,
        predict=predicted_classes,
        directory=directory,
        verify=verify,
        name="digit-cnn",
    )
