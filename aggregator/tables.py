"""A table of a TOML file, read strictly into a class of settings; every refusal names the key."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast

from aggregator.errors import TaskError
from device_sdk.fields import Fields, default_of, hints_of, is_settings

_LARGEST = 1e12

Kind = TypeVar("Kind")


class TomlTable(Fields):
    """The keys of one table. Raises TaskError."""

    __slots__ = ()
    fault = TaskError

    def declared(self, key: str, hint: Any, default: Any = MISSING) -> Any:
        """As every map's; numbers are such as a broadcast carries, and not absurd; a text that may
        be left out, or is one of several, is not empty."""
        value = super().declared(key, hint, default)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise self.wrong(key, value, "an integer of 64 bits")
        if isinstance(value, float) and value > _LARGEST:
            raise self.wrong(key, value, f"a number of at most {_LARGEST:g}")
        if (value == "" and default is None) or (isinstance(value, tuple) and "" in value):
            raise self.wrong(key, value, "texts that are not empty")
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
        for field in fields(cast(Any, kind)):
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
