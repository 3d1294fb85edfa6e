"""What the aggregator must know of a method beside its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from aggregator.methods.method import Method
from device_sdk.artifact import Artifact
from device_sdk.wire.arrays.exchange import Update

__all__ = ["Binding"]


class Binding(Protocol):
    """A method's settings, and how its messages are read. Has no state."""

    @property
    def method_name(self) -> str:
        """The name that devices are told."""

    @property
    def needs_catalogue(self) -> bool:
        """Whether the task must have a catalogue; without the need it has none."""

    @property
    def artifacts(self) -> range:
        """How many artifacts a task may list."""

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        """A method at version 0 for a catalogue of ``items`` items and the task's artifacts.

        Raises ValueError where the artifacts do not suit it.
        """

    def items_of(self, method: Method) -> int:
        """The length of the catalogue that ``method`` is at; 0 without a catalogue."""

    def grow(self, method: Method, items: int, rng: np.random.Generator) -> None:
        """Lengthen the catalogue to ``items``, between rounds; the version rises by one."""

    def decode(self, body: bytes, round_id: int, items: int, sender: str = "") -> Update:
        """The update in ``body`` of the device ``sender``. Raises ``WireError``; pure and total."""

    def width_of(self, update: Update) -> int:
        """How much of the model the device trained (its k), for the operator's eyes; 0 where the
        method has no such thing."""
