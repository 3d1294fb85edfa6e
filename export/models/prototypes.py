"""The train step of federated prototypes: any image network, with an embedding before its head."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from export.build import Exported, export_train_step
from export.losses import example_prototypes, prototype_alignment
from export.models.images import CLASS_METRICS, example_images, image_model
from export.optimizers import Adam, Optimizer


class EmbeddingClassifier(nn.Module):
    """A network's outputs [b, width], rectified, as the embedding of a linear head.

    So networks of any kind embed in one width; FedProto's representation and decision layers.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width is {width}; expected at least 1")
        self.encoder = encoder
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [b, width] and logits [b, classes]."""
        embedding = torch.relu(self.encoder(x))
        return embedding, self.head(embedding)


def embedding_model(
    name: str,
    *,
    width: int = 64,
    channels: int = 1,
    size: int = 28,
    classes: int = 10,
    seed: int = 0,
) -> EmbeddingClassifier:
    """One of the image networks (``images.IMAGE_MODELS``) with ``width`` outputs, and a head.

    ``seed`` draws the initial weights and leaves torch's generator as it was. ValueError for an
    unknown name.
    """
    with torch.random.fork_rng(devices=[]):
        encoder = image_model(name, channels=channels, size=size, classes=width, seed=seed)
        torch.manual_seed(seed + 1)
        return EmbeddingClassifier(encoder, width, classes)


def predicted_embeddings(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``embedding`` [b, width], ``logits`` [b, classes], and ``probabilities``, their softmax."""
    embedding, logits = model(batch["x"])
    return {
        "embedding": embedding,
        "logits": logits,
        "probabilities": torch.softmax(logits, -1),
    }


def export_prototypes(
    directory: str | Path,
    name: str,
    *,
    width: int = 64,
    channels: int = 1,
    size: int = 28,
    classes: int = 10,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    with_metrics: bool = False,
    verify: bool = True,
) -> Exported:
    """Write the artifact of one of the image networks for the method ``prototypes``.

    Batches hold ``x`` and ``label``. ``with_metrics`` declares ``images.CLASS_METRICS``; the loss
    takes what samples do not hold. The optimizer is Adam with 1e-3 by default.
    """
    images = example_images(channels=channels, size=size, classes=classes)
    return export_train_step(
        embedding_model(
            name, width=width, channels=channels, size=size, classes=classes, seed=seed
        ),
        prototype_alignment(lambda model, batch: model(batch["x"])),
        {"x": images["x"], "label": images["y"], **example_prototypes(classes, width, seed=seed)},
        optimizer=optimizer or Adam(lr=1e-3),
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        predict=predicted_embeddings,
        metrics=(dict.fromkeys(CLASS_METRICS, ("logits", "label")) if with_metrics else None),
        directory=directory,
        verify=verify,
        name=name,
    )
