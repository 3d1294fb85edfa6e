"""An AlexNet-shaped network: a large strided first kernel, five convolutions, dropout."""

from __future__ import annotations

from torch import Tensor, nn

from export.models.image_shape import ImageShape


class SmallAlexNet(nn.Module):
    """[b, channels, size, size] float32 to [b, classes] logits.

    Krizhevsky et al. 2012, ImageNet classification with deep convolutional neural networks, section
    3.5, without its local response normalisation: a strided first convolution, overlapping 3 x 3
    pooling, a 5 x 5 and three 3 x 3 convolutions, three linear layers with dropout before two of
    them. Images above 32 pixels have a 7 x 7 first kernel and one pooling more. 136,330 parameters
    for 1 x 28 x 28 and 10 classes.
    """

    def __init__(
        self, classes: int = 10, *, channels: int = 1, size: int = 28, dropout: float = 0.25
    ) -> None:
        super().__init__()
        shape = ImageShape(channels, size, classes)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; expected 0 <= dropout < 1")
        large = size > 32
        first = nn.Conv2d(shape.channels, 16, 7 if large else 5, 2, 3 if large else 2)
        layers: list[nn.Module] = [first, nn.ReLU(), _pool(), nn.Conv2d(16, 32, 5, padding=2)]
        layers.append(nn.ReLU())
        if large:
            layers.append(_pool())
        for inputs, outputs in ((32, 48), (48, 48), (48, 32)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers.append(_pool())
        self.features = nn.Sequential(*layers)
        side = size
        for _ in range(4 if large else 3):
            side = (side + 1) // 2
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(32 * side * side, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def _pool() -> nn.Module:
    return nn.MaxPool2d(3, 2, 1)
