"""What the aggregator must know of a method beside its arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from aggregator.methods.method import Method
from aggregator.tables import TomlTable
from device_sdk.artifact import Artifact
from device_sdk.methods.registry import METHODS, load_method
from device_sdk.wire.arrays.body import decode_update
from device_sdk.wire.arrays.exchange import Update

# A settings class read from a table of a task file, field by field.

Settings = TypeVar("Settings")
_LEAST = -(2**63)
_MOST = 2**63 - 1


def read_settings(
    kind: type[Settings], table: TomlTable, defaults: Settings | None = None
) -> Settings:
    """A ``kind`` (a frozen dataclass of scalars and such classes) with the table's values.

    A field that the table lacks has its default, from ``defaults`` where given; a class inside is
    a table below this one. The table is finished: a key that is no field is refused. Raises
    TaskError, naming the key.
    """
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        default = getattr(defaults, field.name) if defaults is not None else _default(field)
        values[field.name] = _value(hints[field.name], field.name, default, table)
    table.finish()
    try:
        return kind(**values)
    except ValueError as error:
        # The method's classes name the setting; its table is this one.
        raise table.error("", f"holds a setting out of range: {error}") from None


def _value(hint: Any, name: str, default: Any, table: TomlTable) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return read_settings(hint, table.table(name), None if default is MISSING else default)
    if default is MISSING and name not in table:
        raise table.error(name, "is missing")
    if hint is str:
        return table.plain_text(name, "" if default is MISSING else default)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return table.choice(name, choices, choices[0] if default is MISSING else default)
    if hint is bool:
        return table.boolean(name, False if default is MISSING else default)
    if hint is int:
        return table.integer(name, 0 if default is MISSING else default, least=_LEAST, most=_MOST)
    if hint is float:
        return table.number(name, 0.0 if default is MISSING else default)
    raise TypeError(f"{name} is a {hint}, which no task file can hold")


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


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
        return cls(method_name, read_settings(cls.settings_class, table))

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
