"""The small image networks by name, and a classifier's artifact for any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from export import losses
from export.build import Recipe
from export.optimizers import Sgd

# What a small image network takes and gives.


@dataclass(frozen=True)
class ImageShape:
    """Square images [channels, size, size] and the number of classes; ValueError if too small."""

    channels: int = 1
    size: int = 28
    classes: int = 10

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ValueError(f"channels is {self.channels}; expected at least 1 (grey) or 3 (RGB)")
        if self.size < 16:
            raise ValueError(f"size is {self.size}; these networks take images of 16 x 16 or more")
        if self.classes < 2:
            raise ValueError(f"classes is {self.classes}; expected at least 2")


SMALL_GREY = ImageShape()
"""28 x 28 grey images of ten classes, as MNIST's."""

# LeNet-5 for small images.


class LeNet(nn.Module):
    """[b, channels, size, size] float32 to [b, classes] logits.

    LeCun et al. 1998, Gradient-based learning applied to document recognition, section II.B,
    with ReLU and max pooling as is usual today. 61,706 parameters for 1 x 28 x 28 and 10 classes.
    """

    def __init__(self, shape: ImageShape = SMALL_GREY) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(shape.channels, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        side = (shape.size // 2 - 4) // 2
        self.classifier = nn.Sequential(
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, shape.classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


# An AlexNet-shaped network: a large strided first kernel, five convolutions, dropout.


class SmallAlexNet(nn.Module):
    """[b, channels, size, size] float32 to [b, classes] logits.

    Krizhevsky et al. 2012, ImageNet classification with deep convolutional neural networks, section
    3.5, without its local response normalisation: a strided first convolution, overlapping 3 x 3
    pooling, a 5 x 5 and three 3 x 3 convolutions, three linear layers with dropout before two of
    them. Images above 32 pixels have a 7 x 7 first kernel and one pooling more. 136,330 parameters
    for 1 x 28 x 28 and 10 classes.
    """

    def __init__(self, shape: ImageShape = SMALL_GREY, *, dropout: float = 0.25) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; expected 0 <= dropout < 1")
        large = shape.size > 32
        first = nn.Conv2d(shape.channels, 16, 7 if large else 5, 2, 3 if large else 2)
        layers: list[nn.Module] = [first, nn.ReLU(), _pool(), nn.Conv2d(16, 32, 5, padding=2)]
        layers.append(nn.ReLU())
        if large:
            layers.append(_pool())
        for inputs, outputs in ((32, 48), (48, 48), (48, 32)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers.append(_pool())
        self.features = nn.Sequential(*layers)
        side = shape.size
        for _ in range(4 if large else 3):
            side = (side + 1) // 2
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(32 * side * side, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, shape.classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def _pool() -> nn.Module:
    return nn.MaxPool2d(3, 2, 1)


# A residual network small enough to train on a phone-class core.

GROUP = 8
"""Channels that one GroupNorm group holds."""


class SmallResNet(nn.Module):
    """[b, channels, size, size] float32 to [b, classes] logits.

    He et al. 2016, Deep residual learning for image recognition, in the shape of its CIFAR networks
    (section 4.2): a strided 3 x 3 stem and three stages of one residual block, of ``width``, twice
    and four times as many channels, then the mean over the image. Images above 32 pixels are
    halved once more in the stem. 77,562 parameters for 1 x 28 x 28 and 10 classes.

    GroupNorm in place of batch norm: batch norm's running statistics describe one device's data,
    so an average of devices' networks predicts with statistics that fit none of them, and in mutual
    learning a public batch from another domain would shift those that local samples are judged by.
    GroupNorm (Wu and He 2018) keeps no state, and is the same in training and prediction.
    """

    def __init__(self, shape: ImageShape = SMALL_GREY, *, width: int = 16) -> None:
        super().__init__()
        if width < GROUP or width % GROUP:
            raise ValueError(f"width is {width}; expected a multiple of {GROUP}")
        stem: list[nn.Module] = [
            nn.Conv2d(shape.channels, width, 3, 2, 1, bias=False),
            nn.GroupNorm(width // GROUP, width),
            nn.ReLU(),
        ]
        if shape.size > 32:
            stem.append(nn.MaxPool2d(2))
        self.stem = nn.Sequential(*stem)
        self.blocks = nn.Sequential(
            _Block(width, width, 1), _Block(width, 2 * width, 2), _Block(2 * width, 4 * width, 2)
        )
        self.classifier = nn.Linear(4 * width, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


class _Block(nn.Module):
    """relu(x' + f(x)), f two 3 x 3 convolutions, x' a 1 x 1 convolution where shapes differ."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        groups = outputs // GROUP
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            self.shortcut = nn.Conv2d(channels, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


# A VGG-shaped network: nothing but 3 x 3 convolutions and halvings.


class SmallVgg(nn.Module):
    """[b, channels, size, size] float32 to [b, classes] logits.

    Simonyan and Zisserman 2015, Very deep convolutional networks, table 1, configuration A: one
    3 x 3 convolution in each of the first two stages, two in the later ones, channels doubling from
    ``width``, a halving after each stage, down to maps of at most 4 x 4. 34,282 parameters for
    1 x 28 x 28 and 10 classes. No normalisation, as there: nothing in it depends on the batch.
    """

    def __init__(self, shape: ImageShape = SMALL_GREY, *, width: int = 8) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width is {width}; expected at least 1")
        layers: list[nn.Module] = []
        inputs, side, stage = shape.channels, shape.size, 0
        while side > 4:
            outputs = width * 2**stage
            for _ in range(1 if stage < 2 else 2):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
            side //= 2
            stage += 1
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(inputs * side * side, 64), nn.ReLU(), nn.Linear(64, shape.classes)
        )
        _scale_for_relu(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def _scale_for_relu(model: nn.Module) -> None:
    """He et al. 2015's initial scale: torch's default lets six layers without norm fade out."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


ImageModel = Literal["lenet", "resnet", "vgg", "alexnet"]
IMAGE_MODELS: tuple[str, ...] = get_args(ImageModel)

_CLASSES: dict[str, Callable[..., nn.Module]] = {
    "lenet": LeNet,
    "resnet": SmallResNet,
    "vgg": SmallVgg,
    "alexnet": SmallAlexNet,
}


def image_model(name: str, shape: ImageShape = SMALL_GREY, *, seed: int = 0) -> nn.Module:
    """One of the small networks, [b, channels, size, size] float32 to [b, classes] logits.

    ``seed`` draws the initial weights and leaves torch's generator as it was. ValueError for an
    unknown name.
    """
    if name not in _CLASSES:
        raise ValueError(f"there is no image model {name!r}; expected {', '.join(IMAGE_MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _CLASSES[name](shape)


def example_images(
    shape: ImageShape = SMALL_GREY, *, batch: int = 8, seed: int = 0
) -> dict[str, Tensor]:
    """Random ``x`` [b, channels, size, size] and ``y`` int64 [b], to trace and verify with."""
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, shape.channels, shape.size, shape.size, generator=g),
        "y": torch.randint(shape.classes, (batch,), generator=g),
    }


def classification(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy of ``y`` int64 [b] given ``x``; output ``logits`` [b, classes]."""
    logits = model(batch["x"])
    return losses.cross_entropy(logits, batch["y"]), {"logits": logits}


def predicted_classes(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``logits`` [b, classes] and ``probabilities`` [b, classes], their softmax."""
    logits = model(batch["x"])
    return {"logits": logits, "probabilities": torch.softmax(logits, -1)}


CLASS_METRICS = dict.fromkeys(("accuracy", "log_loss", "calibration"), ("logits", "y"))
"""What a classifier of these may be evaluated by, whatever it is trained with."""


def image_recipe(name: str, shape: ImageShape = SMALL_GREY, *, seed: int = 0) -> Recipe:
    """A classifier: ``Trainer.step({"x": ..., "y": ...})``, any batch size.

    It may be evaluated by the loss and ``CLASS_METRICS``.
    """
    return Recipe(
        image_model(name, shape, seed=seed),
        classification,
        example_images(shape),
        {"x": {0: "batch"}, "y": {0: "batch"}},
        Sgd(lr=0.05, momentum=0.9),
        predict=predicted_classes,
        metrics={"loss": "loss", **CLASS_METRICS},
        name=name,
    )
