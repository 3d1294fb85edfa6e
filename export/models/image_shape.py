"""What a small image network takes and gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageShape:
    """Square images [channels, size, size] and the number of classes; ValueError if too small."""

    channels: int
    size: int
    classes: int

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ValueError(f"channels is {self.channels}; expected at least 1 (grey) or 3 (RGB)")
        if self.size < 16:
            raise ValueError(f"size is {self.size}; these networks take images of 16 x 16 or more")
        if self.classes < 2:
            raise ValueError(f"classes is {self.classes}; expected at least 2")
