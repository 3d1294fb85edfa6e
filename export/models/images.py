"""The small image networks by name, and a classifier's artifact for any of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from export import losses
from export.build import Exported, export_train_step
from export.models.lenet import LeNet
from export.models.small_alexnet import SmallAlexNet
from export.models.small_resnet import SmallResNet
from export.models.small_vgg import SmallVgg
from export.optimizers import Optimizer, Sgd

ImageModel = Literal["lenet", "resnet", "vgg", "alexnet"]
IMAGE_MODELS: tuple[str, ...] = get_args(ImageModel)

_CLASSES: dict[str, Callable[..., nn.Module]] = {
    "lenet": LeNet,
    "resnet": SmallResNet,
    "vgg": SmallVgg,
    "alexnet": SmallAlexNet,
}


def image_model(
    name: str, *, channels: int = 1, size: int = 28, classes: int = 10, seed: int = 0
) -> nn.Module:
    """One of the small networks, [b, channels, size, size] float32 to [b, classes] logits.

    ``seed`` draws the initial weights and leaves torch's generator as it was. ValueError for an
    unknown name.
    """
    if name not in _CLASSES:
        raise ValueError(f"there is no image model {name!r}; expected {', '.join(IMAGE_MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _CLASSES[name](classes, channels=channels, size=size)


def example_images(
    *, channels: int = 1, size: int = 28, classes: int = 10, batch: int = 8, seed: int = 0
) -> dict[str, Tensor]:
    """Random ``x`` [b, channels, size, size] and ``y`` int64 [b], to trace and verify with."""
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, channels, size, size, generator=g),
        "y": torch.randint(classes, (batch,), generator=g),
    }


def classification(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy of ``y`` int64 [b] given ``x``; output ``logits`` [b, classes]."""
    logits = model(batch["x"])
    return losses.cross_entropy(logits, batch["y"]), {"logits": logits}


def predicted_classes(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``logits`` [b, classes] and ``probabilities`` [b, classes], their softmax."""
    logits = model(batch["x"])
    return {"logits": logits, "probabilities": torch.softmax(logits, -1)}


def export_image(
    directory: str | Path,
    name: str,
    *,
    channels: int = 1,
    size: int = 28,
    classes: int = 10,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    verify: bool = True,
) -> Exported:
    """Write a classifier's artifact: ``Trainer.step({"x": ..., "y": ...})``, any batch size."""
    return export_train_step(
        image_model(name, channels=channels, size=size, classes=classes, seed=seed),
        classification,
        example_images(channels=channels, size=size, classes=classes),
        optimizer=optimizer or Sgd(lr=0.05, momentum=0.9),
        dynamic={"x": {0: "batch"}, "y": {0: "batch"}},
        predict=predicted_classes,
        directory=directory,
        verify=verify,
        name=name,
    )
