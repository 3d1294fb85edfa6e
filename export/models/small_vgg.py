"""A VGG-shaped network: nothing but 3 x 3 convolutions and halvings."""

from __future__ import annotations

from torch import Tensor, nn

from export.models.image_shape import ImageShape


class SmallVgg(nn.Module):
    """[b, channels, size, size] float32 to [b, classes] logits.

    Simonyan and Zisserman 2015, Very deep convolutional networks, table 1, configuration A: one
    3 x 3 convolution in each of the first two stages, two in the later ones, channels doubling from
    ``width``, a halving after each stage, down to maps of at most 4 x 4. 34,282 parameters for
    1 x 28 x 28 and 10 classes. No normalisation, as there: nothing in it depends on the batch.
    """

    def __init__(
        self, classes: int = 10, *, channels: int = 1, size: int = 28, width: int = 8
    ) -> None:
        super().__init__()
        shape = ImageShape(channels, size, classes)
        if width < 1:
            raise ValueError(f"width is {width}; expected at least 1")
        layers: list[nn.Module] = []
        inputs, side, stage = shape.channels, size, 0
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
            nn.Linear(inputs * side * side, 64), nn.ReLU(), nn.Linear(64, classes)
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
