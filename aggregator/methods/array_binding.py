"""What methods on local arrays have in common: no catalogue, models from artifacts, one body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from aggregator.methods.method import Method
from device_sdk.artifact import Artifact
from device_sdk.wire.arrays.body import decode_update
from device_sdk.wire.arrays.exchange import Update

__all__ = ["MOST_ARTIFACTS", "ArrayBinding"]

MOST_ARTIFACTS = 32
Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class ArrayBinding(Generic[Settings]):
    """``make`` builds the method from the task's artifacts, smallest first, and the settings."""

    method_name: str
    settings: Settings
    make: Callable[[Sequence[Artifact], Settings], Method]
    artifacts: range = range(1, MOST_ARTIFACTS + 1)
    needs_catalogue: bool = False

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        """See :class:`~aggregator.methods.binding.Binding`."""
        return self.make(artifacts, self.settings)

    def items_of(self, method: Method) -> int:
        """There is no catalogue."""
        return 0

    def grow(self, method: Method, items: int, rng: np.random.Generator) -> None:
        """Never called: there is no catalogue."""
        raise TypeError(f"{self.method_name} has no catalogue that could grow")

    def decode(self, body: bytes, round_id: int, items: int, sender: str = "") -> Update:
        """See :class:`~aggregator.methods.binding.Binding`."""
        return decode_update(body, round_id, sender)

    def width_of(self, update: Update) -> int:
        """Models are trained whole."""
        return 0
