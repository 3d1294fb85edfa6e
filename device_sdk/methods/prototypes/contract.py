"""The training settings that a prototypes broadcast carries, and an update's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Within
from device_sdk.methods.labels import MOST_CLASSES, LabelKnowledge, decode_labels, encode_labels
from device_sdk.wire.arrays.exchange import TrainingInPasses
from device_sdk.wire.arrays.tensors import LARGEST_TO_HAND_ON, BeyondWire

_MOST_NUMBERS = 1 << 24
"""Of all prototypes together."""


@dataclass(frozen=True, slots=True)
class PrototypesTraining(TrainingInPasses):
    """How every device trains in a round of prototypes.

    Attributes:
        classes: number of labels, 2 to 4,096.
        width: numbers of an embedding, the same in every device's model; classes times width is at
            most 16,777,216.
        epochs: local passes a round; 0 for one, or for as many as 30 steps take.
        batch_size, most_steps: samples a step, and the most steps a round (0 for no limit).
        learning_rate: replaces the artifact's ``lr``; 0 leaves the artifact's own.
        pull: lambda, the weight of the distance to a label's prototype (FedProto, equation 7).

    Raises ValueError, naming the setting, for a value outside its range.
    """

    classes: Annotated[int, Within(2, MOST_CLASSES)]
    width: Annotated[int, Within(1, 65_536)] = 64
    epochs: Annotated[int, Within(0, 1000)] = 0
    batch_size: Annotated[int, Within(1, 1_000_000)] = 32
    most_steps: Annotated[int, Within(0, 1_000_000_000)] = 0
    learning_rate: Annotated[float, Within(0, 1e3)] = 0.0
    pull: Annotated[float, Within(0, 1e6)] = 1.0

    def check(self) -> None:
        """Raises ValueError for settings that do not go together."""
        if self.classes * self.width > _MOST_NUMBERS:
            raise ValueError(
                f"classes times width is {self.classes * self.width:,}; expected at most "
                f"{_MOST_NUMBERS:,}"
            )


def encode_prototypes(knowledge: LabelKnowledge) -> dict[str, NDArray[Any]]:
    """``labels`` uint16 [n], ``counts`` int32 [n] and ``prototypes`` float32 [n, width], which
    travel in the task's ``update_codec``.

    Raises ValueError for numbers that are not finite or that not every codec carries.
    """
    _require_moderate(knowledge.means)
    return {**encode_labels(knowledge), "prototypes": knowledge.means}


def decode_prototypes(
    tensors: Mapping[str, NDArray[Any]], training: PrototypesTraining
) -> LabelKnowledge:
    """What :func:`encode_prototypes` was given, as it arrived.

    Total: raises ValueError for other names, dtypes, shapes or ranges, whatever the arrays hold.
    """
    labels, counts = decode_labels(tensors, training.classes, ("prototypes",))
    found, shape = tensors["prototypes"], (len(labels), training.width)
    if found.dtype != np.float32 or found.shape != shape:
        raise ValueError(f"'prototypes' are {found.dtype} {found.shape}; expected float32 {shape}")
    _require_moderate(found)
    return LabelKnowledge(labels, counts, found)


def _require_moderate(values: NDArray[np.float32]) -> None:
    # NaN fails the comparison.
    if values.size and not float(np.abs(values).max()) <= LARGEST_TO_HAND_ON:
        raise BeyondWire(
            f"a prototype holds a number that is not finite or above {LARGEST_TO_HAND_ON:g}"
        )
