"""A residual network small enough to train on a phone-class core."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from export.models.image_shape import ImageShape

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

    def __init__(
        self, classes: int = 10, *, channels: int = 1, size: int = 28, width: int = 16
    ) -> None:
        super().__init__()
        shape = ImageShape(channels, size, classes)
        if width < GROUP or width % GROUP:
            raise ValueError(f"width is {width}; expected a multiple of {GROUP}")
        stem: list[nn.Module] = [
            nn.Conv2d(shape.channels, width, 3, 2, 1, bias=False),
            nn.GroupNorm(width // GROUP, width),
            nn.ReLU(),
        ]
        if size > 32:
            stem.append(nn.MaxPool2d(2))
        self.stem = nn.Sequential(*stem)
        self.blocks = nn.Sequential(
            _Block(width, width, 1), _Block(width, 2 * width, 2), _Block(2 * width, 4 * width, 2)
        )
        self.classifier = nn.Linear(4 * width, classes)

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
