"""An artifact for a method, written by the exporter of whichever release runs this.

Given the method and the folder.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import export
from export.losses import (
    PENALTY,
    cross_entropy,
    distillation,
    example_prototypes,
    example_teachers,
    prototype_alignment,
)

FEATURES, CLASSES = 8, 10


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = torch.tanh(self.encoder(x))
        return embedding, self.head(embedding)


def main(method: str, folder: str) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, FEATURES), "label": torch.arange(5)}
    dynamic = {name: {0: "batch"} for name in batch}
    linear = nn.Linear(FEATURES, CLASSES)
    rate = export.Sgd(lr=0.1)
    if method == "prototypes":
        export.train_step(
            _Encoder(),
            prototype_alignment(lambda model, batch: model(batch["x"])),
            {**batch, **example_prototypes(CLASSES, 6)},
            optimizer=rate,
            dynamic=dynamic,
            predict=lambda model, batch: {
                "embedding": model(batch["x"])[0],
                "probabilities": torch.softmax(model(batch["x"])[1], -1),
            },
            directory=folder,
        )
    elif method == "teacher_logits":
        export.train_step(
            linear,
            distillation(lambda model, batch: model(batch["x"])),
            {**batch, **example_teachers(CLASSES)},
            optimizer=rate,
            dynamic=dynamic,
            predict=lambda model, batch: {"probabilities": torch.softmax(model(batch["x"]), -1)},
            gradient=PENALTY,
            directory=folder,
        )
    elif method == "mutual":
        from export.models.mutual import DYNAMIC, mutual_losses

        weights = ("weight_local", "weight_public", "project", "weight_kl", "weight_ce")
        export.train_step(
            linear,
            mutual_losses,
            {
                "x": torch.randn(5, FEATURES),
                "y": torch.randint(CLASSES, (5,)),
                "x_pub": torch.randn(4, FEATURES),
                "y_pub": torch.randint(CLASSES, (4,)),
                "teacher": torch.softmax(torch.randn(4, CLASSES), -1),
                "confidence": torch.rand(4),
                **{name: torch.tensor(1.0) for name in weights},
            },
            optimizer=rate,
            dynamic=DYNAMIC,
            gradient=export.ConflictProjection(),
            predict=lambda model, batch: {"probabilities": torch.softmax(model(batch["x"]), -1)},
            directory=folder,
        )
    else:
        export.train_step(
            linear,
            lambda model, batch: cross_entropy(model(batch["x"]), batch["label"]),
            batch,
            optimizer=rate,
            dynamic=dynamic,
            directory=folder,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
