"""A table of a TOML file, read strictly into a class of settings; every refusal names the key."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

from aggregator.errors import TaskError
from device_sdk.fields import (
    UNBOUNDED,
    Fields,
    Settings,
    Within,
    default_of,
    hints_of,
    is_settings,
)

_LARGEST = 1e12

Kind = TypeVar("Kind", bound=Settings)


class TomlTable(Fields):
    """The keys of one table. Raises TaskError."""

    __slots__ = ()
    fault = TaskError

    def integer(self, key: str, within: Within = UNBOUNDED, default: Any = MISSING) -> int:
        """An integer of 64 bits: a broadcast carries no other."""
        value = super().integer(key, within, default)
        if not -(2**63) <= value < 2**63:
            raise self.wrong(key, value, "an integer of 64 bits")
        return value

    def number(self, key: str, within: Within = UNBOUNDED, default: Any = MISSING) -> float:
        """A finite number of at most 1e12: what lies beyond it is a slip."""
        value = super().number(key, within, default)
        if value > _LARGEST:
            raise self.wrong(key, value, f"a number of at most {_LARGEST:g}")
        return value

    def table(self, key: str) -> TomlTable:
        """A table below this one, empty when the file has none."""
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "must be a table")
        return TomlTable(value, self.name(key))

    def __contains__(self, key: str) -> bool:
        return key in self.names()

    def read(self, kind: type[Kind], defaults: Kind | None = None) -> Kind:
        """A ``kind`` (a frozen dataclass of scalars and such classes) with the table's values.

        A field that the table lacks has its default, from ``defaults`` where given; a class inside
        is a table below this one. A key that is no field is refused.
        """
        values: dict[str, Any] = {}
        for field in fields(kind):
            name, hint = field.name, hints_of(kind)[field.name]
            default = default_of(field) if defaults is None else getattr(defaults, name)
            if is_settings(hint):
                inside = default if isinstance(default, hint) else None
                values[name] = self.table(name).read(hint, inside)
            else:
                values[name] = self.declared(name, hint, default)
        self.end()
        try:
            return kind(**values)
        except ValueError as error:
            # What single fields may be was looked at; how they go together the class knows.
            raise self.error("", f"holds settings that do not go together: {error}") from None
