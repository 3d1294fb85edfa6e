"""LeNet-5 for 1 x 28 x 28 images."""

from __future__ import annotations

from torch import Tensor, nn


class LeNet(nn.Module):
    """[b, 1, 28, 28] float32 to [b, classes] logits.

    LeCun et al. 1998, Gradient-based learning applied to document recognition, section II.B,
    with ReLU and max pooling as is usual today.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        if classes < 2:
            raise ValueError(f"classes is {classes}; expected at least 2")
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
