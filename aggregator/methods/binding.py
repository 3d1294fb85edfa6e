"""What the aggregator must know of a method beside its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from aggregator.methods.method import Method
from device_sdk.artifact import Artifact
from device_sdk.wire.arrays.body import decode_update
from device_sdk.wire.arrays.exchange import Update

Settings = TypeVar("Settings")


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


# What methods on local arrays have in common: no catalogue, models from artifacts, one body.

MOST_ARTIFACTS = 32


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
