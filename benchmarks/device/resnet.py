"""The 18-layer residual network with a choice of width."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """relu(x' + f(x)), f two 3 x 3 convolutions, x' a 1 x 1 convolution where shapes differ."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """[b, 3, h, w] float32 (h and w multiples of 32) to [b, classes] logits.

    He et al. 2016, Deep residual learning for image recognition, table 1, 18 layers;
    ``width`` is the channels of the first stage (64 there), doubled at each of the other ``stages``
    (4 there in all).
    """

    def __init__(self, classes: int = 10, width: int = 64, stages: int = 4) -> None:
        super().__init__()
        if classes < 2 or width < 1 or stages < 1:
            raise ValueError(
                f"classes is {classes}, width {width} and stages {stages}; "
                "expected at least 2, 1 and 1"
            )
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(stages):
            outputs = width * 2**stage
            blocks.append(ResidualBlock(channels, outputs, 1 if stage == 0 else 2))
            blocks.append(ResidualBlock(outputs, outputs, 1))
            channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.blocks(self.stem(x)).mean((2, 3))
        logits: Tensor = self.classifier(pooled)
        return logits
