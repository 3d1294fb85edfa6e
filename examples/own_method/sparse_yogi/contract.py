"""What both ends agree on: the settings that a broadcast carries, and how much is sent."""

from __future__ import annotations

from dataclasses import dataclass

from device_sdk.wire.arrays.exchange import TrainingSettings, require_number, require_whole


@dataclass(frozen=True, slots=True)
class SparseTraining(TrainingSettings):
    """How every device trains in a round.

    Attributes:
        keep: the share of the parameters that a device sends, the largest changes first.
        epochs, batch_size: passes over the local samples, and samples a step.
        learning_rate: of the artifact's optimizer.

    Raises ValueError, naming the setting.
    """

    keep: float = 0.1
    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 0.05

    def __post_init__(self) -> None:
        require_number("keep", self.keep, 0, 1, above=True)
        require_whole("epochs", self.epochs, 1)
        require_whole("batch_size", self.batch_size, 1)
        require_number("learning_rate", self.learning_rate, 0, 1e3, above=True)

    def kept(self, size: int) -> int:
        """How many of ``size`` parameters are sent; at least one."""
        return max(1, round(self.keep * size))
