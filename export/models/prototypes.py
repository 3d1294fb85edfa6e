"""The train step of federated prototypes: any image network, with an embedding before its head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from export.build import Recipe
from export.losses import example_prototypes, prototype_alignment
from export.models.images import CLASS_METRICS, SMALL_GREY, ImageShape, example_images, image_model


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
    name: str, shape: ImageShape = SMALL_GREY, *, width: int = 64, seed: int = 0
) -> EmbeddingClassifier:
    """One of the image networks (``images.IMAGE_MODELS``) with ``width`` outputs, and a head.

    ``seed`` draws the initial weights and leaves torch's generator as it was. ValueError for an
    unknown name.
    """
    with torch.random.fork_rng(devices=[]):
        encoder = image_model(name, replace(shape, classes=width), seed=seed)
        torch.manual_seed(seed + 1)
        return EmbeddingClassifier(encoder, width, shape.classes)


def predicted_embeddings(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``embedding`` [b, width], ``logits`` [b, classes], and ``probabilities``, their softmax."""
    embedding, logits = model(batch["x"])
    return {
        "embedding": embedding,
        "logits": logits,
        "probabilities": torch.softmax(logits, -1),
    }


def prototypes_recipe(
    name: str, shape: ImageShape = SMALL_GREY, *, width: int = 64, seed: int = 0
) -> Recipe:
    """One of the image networks (``images.IMAGE_MODELS``) for the method ``prototypes``.

    Batches hold ``x`` and ``label``. It may be evaluated by ``images.CLASS_METRICS``; the loss
    takes what samples do not hold. The optimizer is Adam with 1e-3.
    """
    images = example_images(shape)
    prototypes = example_prototypes(shape.classes, width, seed=seed)
    return Recipe(
        embedding_model(name, shape, width=width, seed=seed),
        prototype_alignment(lambda model, batch: model(batch["x"])),
        {"x": images["x"], "label": images["y"], **prototypes},
        {"x": {0: "batch"}, "label": {0: "batch"}},
        predict=predicted_embeddings,
        metrics=dict.fromkeys(CLASS_METRICS, ("logits", "label")),
        name=name,
    )
