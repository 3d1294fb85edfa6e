"""LeNet-5 for small images."""

from __future__ import annotations

from torch import Tensor, nn

from export.models.image_shape import ImageShape


class LeNet(nn.Module):
    """[b, channels, size, size] float32 to [b, classes] logits.

    LeCun et al. 1998, Gradient-based learning applied to document recognition, section II.B,
    with ReLU and max pooling as is usual today. 61,706 parameters for 1 x 28 x 28 and 10 classes.
    """

    def __init__(self, classes: int = 10, *, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        shape = ImageShape(channels, size, classes)
        self.features = nn.Sequential(
            nn.Conv2d(shape.channels, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        side = (size // 2 - 4) // 2
        self.classifier = nn.Sequential(
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
