"""A trained model as it is kept to predict with: parameters and buffers, without the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from device_sdk.trainer import Trainer

__all__ = ["load_model_arrays", "model_arrays"]

_KINDS = ("parameter", "buffer")


def model_arrays(trainer: Trainer) -> dict[str, NDArray[Any]]:
    """State tensors of kinds parameter and buffer, by their names: copies."""
    kinds = {tensor.name: tensor.kind for tensor in trainer.artifact.state}
    return {name: array for name, array in trainer.state.items() if kinds[name] in _KINDS}


def load_model_arrays(trainer: Trainer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The inverse. Raises StateError where they are of another artifact."""
    trainer.set_state(arrays)
