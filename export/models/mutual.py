"""Mutual learning's train step: one artifact for local, public, FedMD-like and proximal steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from export import losses
from export.build import Recipe
from export.gradient_rules import ConflictProjection
from export.losses import proximal, with_anchor
from export.models.images import (
    CLASS_METRICS,
    SMALL_GREY,
    ImageShape,
    example_images,
    image_model,
    predicted_classes,
)

DYNAMIC = {
    "x": {0: "batch"},
    "y": {0: "batch"},
    "x_pub": {0: "public"},
    "y_pub": {0: "public"},
    "teacher": {0: "public"},
    "confidence": {0: "public"},
}


def mutual_losses(
    model: nn.Module, batch: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The local and the public loss of MAFML (papers/mafml), equations 1 and 3 to 5.

    batch, the local samples: ``x`` float32 [batch, ...], ``y`` int64 [batch]; the public samples of
    other devices: ``x_pub`` [public, ...], ``y_pub`` int64 [public], ``teacher`` float32
    [public, classes] (their owner's soft labels), ``confidence`` float32 [public] (A of their
    owner); and the scalars ``weight_kl`` and ``weight_ce``. These and the scalars of
    ``ConflictProjection`` choose the kind of step. Equal numbers of samples from each owner give
    the mean over owners.

    local  = mean CE(y), plus mu / 2 * |w - anchor|^2 where the model has an anchor (scalar ``mu``);
    public = mean(weight_kl * confidence * KL(teacher || p) + weight_ce * CE(y_pub)).

    Several teachers a sample, sum over t of A_t * KL(p_t || p), have the gradient of the one
    teacher sum(A_t p_t) / sum(A_t) with confidence sum(A_t): the caller reduces them.

    outputs: ``local_loss``, ``public_loss`` float32 [].
    """
    local = losses.cross_entropy(model(batch["x"]), batch["y"])
    if hasattr(model, "anchor"):
        local = local + proximal(model, batch["mu"])
    logits = model(batch["x_pub"])
    divergence = losses.kl_divergence(logits, batch["teacher"], reduction="none")
    labelled = losses.cross_entropy(logits, batch["y_pub"], reduction="none")
    public = (
        batch["weight_kl"] * (batch["confidence"] * divergence).mean()
        + batch["weight_ce"] * labelled.mean()
    )
    outputs = {"local_loss": local, "public_loss": public}
    return {"local": local, "public": public}, outputs


def example_batch(
    shape: ImageShape = SMALL_GREY, *, batch: int = 8, public: int = 6, seed: int = 0
) -> dict[str, Tensor]:
    """Random samples and teachers, to trace and verify with."""
    own = example_images(shape, batch=batch, seed=seed)
    others = example_images(shape, batch=public, seed=seed + 1)
    g = torch.Generator().manual_seed(seed)
    # A mean that the networks see as another domain: their gradients then do conflict.
    return {
        **own,
        "x_pub": others["x"] - 1.0,
        "y_pub": others["y"],
        "teacher": torch.softmax(2 * torch.randn(public, shape.classes, generator=g), -1),
        "confidence": torch.rand(public, generator=g),
        "weight_local": torch.tensor(0.5),
        "weight_public": torch.tensor(1.0),
        "project": torch.tensor(1.0),
        "weight_kl": torch.tensor(1.0),
        "weight_ce": torch.tensor(1.0),
    }


def mutual_recipe(
    name: str, shape: ImageShape = SMALL_GREY, *, seed: int = 0, with_proximal: bool = False
) -> Recipe:
    """Mutual learning of one of the image networks (``images.IMAGE_MODELS``).

    ``with_proximal`` adds anchors and the batch scalar ``mu`` (FedProx); see ``export.losses``.
    It may be evaluated by ``images.CLASS_METRICS``; the loss takes what samples do not hold.
    The optimizer is Adam with 1e-3, as in the paper.
    """
    model = image_model(name, shape, seed=seed)
    batch = example_batch(shape)
    if with_proximal:
        model = with_anchor(model)
        batch["mu"] = torch.tensor(0.1)
    return Recipe(
        model,
        mutual_losses,
        batch,
        DYNAMIC,
        predict=predicted_classes,
        gradient=ConflictProjection(),
        metrics=CLASS_METRICS,
        name=name,
    )
