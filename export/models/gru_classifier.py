"""A GRU over a window of measurements, and a class for what comes after it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from export import losses
from export.build import Recipe
from export.models.images import CLASS_METRICS
from export.optimizers import Sgd

DYNAMIC = {"x": {0: "batch"}, "y": {0: "batch"}}


class GruClassifier(nn.Module):
    """[b, hours, features] float32 to [b, classes] logits of the GRU's last hidden state.

    The base network of papers/fedamn, section 4.1 (two layers of 128 there).
    """

    def __init__(
        self, features: int, hidden: int, classes: int, *, layers: int = 1, seed: int = 0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.gru = nn.GRU(features, hidden, layers, batch_first=True)
            self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        logits: Tensor = self.head(states[:, -1])
        return logits


def classification(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of ``y`` int64 [b] given ``x``."""
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def predicted_classes(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``logits`` [b, classes] and ``probabilities`` [b, classes], their softmax."""
    logits = model(batch["x"])
    return {"logits": logits, "probabilities": torch.softmax(logits, -1)}


def example_windows(
    features: int, *, hours: int = 48, classes: int = 5, batch: int = 8, seed: int = 0
) -> dict[str, Tensor]:
    """Random ``x`` [b, hours, features] and ``y`` int64 [b], to trace and verify with."""
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, hours, features, generator=g),
        "y": torch.randint(classes, (batch,), generator=g),
    }


def gru_recipe(model: GruClassifier, *, hours: int = 48) -> Recipe:
    """Its artifact: ``Trainer.step({"x": ..., "y": ...})``, any batch size.

    It may be evaluated by the loss and ``images.CLASS_METRICS``.
    """
    gru, head = model.gru, model.head
    return Recipe(
        model,
        classification,
        example_windows(gru.input_size, hours=hours, classes=head.out_features),
        DYNAMIC,
        Sgd(lr=0.1, momentum=0.9),
        predict=predicted_classes,
        metrics={"loss": "loss", **CLASS_METRICS},
        name=f"gru{gru.hidden_size}",
    )
