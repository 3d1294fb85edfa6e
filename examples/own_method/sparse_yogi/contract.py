"""What both ends agree on: the settings that a broadcast carries, and how much is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from device_sdk.fields import Within
from device_sdk.wire.arrays.exchange import TrainingSettings


@dataclass(frozen=True, slots=True)
class SparseTraining(TrainingSettings):
    """How every device trains in a round.

    Attributes:
        keep: the share of the parameters that a device sends, the largest changes first.
        epochs, batch_size: passes over the local samples, and samples a step.
        learning_rate: of the artifact's optimizer.

    Raises ValueError, naming the setting.
    """

    keep: Annotated[float, Within(0, 1, above=True)] = 0.1
    epochs: Annotated[int, Within(1)] = 1
    batch_size: Annotated[int, Within(1)] = 32
    learning_rate: Annotated[float, Within(0, 1e3, above=True)] = 0.05

    def kept(self, size: int) -> int:
        """How many of ``size`` parameters are sent; at least one."""
        return max(1, round(self.keep * size))
