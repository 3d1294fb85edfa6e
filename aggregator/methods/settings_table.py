"""A settings class read from a table of a task file, field by field."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from aggregator.tables import TomlTable

__all__ = ["read_settings"]

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
