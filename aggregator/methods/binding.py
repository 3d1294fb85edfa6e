"""What the aggregator must know of a method beside its arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from aggregator.methods.method import Method
from aggregator.tables import TomlTable
from device_sdk.artifact import Artifact
from device_sdk.methods.registry import METHODS, load_method
from device_sdk.wire.arrays.exchange import Update, decode_update

Settings = TypeVar("Settings")


MOST_ARTIFACTS = 32


@dataclass(frozen=True, slots=True)
class Binding(Generic[Settings], ABC):
    """A method as a task has it: its name and settings, and how its messages are read.

    It has no state. The defaults are those of a method on local arrays: no catalogue, models from
    artifacts, updates of named arrays. A method says what its ``settings_class`` is and how it is
    built from it.
    """

    method_name: str
    """The name that devices are told."""
    settings: Settings

    settings_class: ClassVar[type[Any]]
    """A frozen dataclass, read from the task file's table of the method's name."""
    needs_catalogue: ClassVar[bool] = False
    """Whether the task must have a catalogue; without the need it has none."""
    artifacts: ClassVar[range] = range(1, MOST_ARTIFACTS + 1)
    """How many artifacts a task may list."""

    @classmethod
    def read(cls, method_name: str, table: TomlTable) -> Self:
        """Read the method's table. Raises TaskError, naming the key."""
        return cls(method_name, table.read(cls.settings_class))

    @abstractmethod
    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        """A method at version 0 for a catalogue of ``items`` items and the task's artifacts,
        smallest first.

        Raises ValueError where the artifacts do not suit it.
        """

    def items_of(self, method: Method) -> int:
        """The length of the catalogue that ``method`` is at; 0 without a catalogue."""
        return 0

    def grow(self, method: Method, items: int, rng: np.random.Generator) -> None:
        """Lengthen the catalogue to ``items``, between rounds; the version rises by one."""
        raise TypeError(f"{self.method_name} has no catalogue that could grow")

    def decode(self, body: bytes, round_id: int, items: int, sender: str = "") -> Update:
        """The update in ``body`` of the device ``sender``. Raises ``WireError``; pure and total."""
        return decode_update(body, round_id, sender)

    def width_of(self, update: Update) -> int:
        """How much of the model the device trained (its k), for the operator's eyes; 0 where the
        method has no such thing."""
        return 0


def read_binding(method: str, table: TomlTable) -> Binding[Any]:
    """A task's binding, from the installed package that offers the method.

    ``table``: the one of the method's name. Raises MethodError, and TaskError, naming the key.
    """
    kind: type[Binding[Any]] = load_method(METHODS, method, Binding)
    return kind.read(method, table)
