"""The tables, made from the classes of their rows, and the version that they are of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from aggregator.errors import AggregatorError
from aggregator.evaluation import Figure
from aggregator.store.rows import (
    U64,
    DeviceEvaluation,
    DeviceRow,
    Habit,
    IssuedDescriptor,
    LastParticipation,
    LeaseRow,
    LoggedUpdate,
    RoundRow,
    ShareRow,
    StoredCheckpoint,
    StoredReport,
    StoredVerdict,
    TaskRow,
    TokenRow,
    VersionRow,
    WorkerRow,
)
from device_sdk.fields import default_of
from device_sdk.wire.seal.broadcast import GroupKey

# Rows are written and read as they are declared.

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class _Columns(Generic[Row]):
    """How the rows of a class are read and written.

    Each field is the column of its name, a time in Unix seconds that of its name without the unit;
    ``metadata={"column": ...}`` names another one, or an expression, which is read alone. Truth
    values are stored as 0 and 1, maps and tuples as JSON, a number that is not defined as
    NULL.
    """

    kind: type[Row]
    names: tuple[str, ...]
    readers: tuple[tuple[int, Callable[[Any], Any]], ...]
    """Of the places that are not read as they are stored."""
    written: tuple[tuple[str, str, Any], ...]
    """Field, column and type of what is no expression."""

    def read(self, stored: Sequence[Any]) -> Row:
        if self.readers:
            stored = list(stored)
            for place, reader in self.readers:
                stored[place] = reader(stored[place])
        return self.kind(*stored)

    def write(self, row: Row) -> dict[str, Any]:
        return {name: _stored(getattr(row, own), hint) for own, name, hint in self.written}


def columns_of(kind: type[Row]) -> _Columns[Row]:
    """Of a dataclass, or a named tuple."""
    return cast(_Columns[Row], _columns_of(cast(Any, kind)))


@cache
def _columns_of(kind: Any) -> _Columns[Any]:
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        named = {each.name: each.metadata.get("column") for each in fields(kind)}
    else:
        named = dict.fromkeys(hints)
    names = {own: name or _column_of(own) for own, name in named.items()}
    read = [(place, _reader(hints[own])) for place, own in enumerate(names)]
    return _Columns(
        kind,
        tuple(names.values()),
        tuple((place, each) for place, each in read if each is not None),
        tuple((own, name, hints[own]) for own, name in names.items() if name.isidentifier()),
    )


def _column_of(own: str) -> str:
    return own.removesuffix("_seconds") if own.endswith("_unix_seconds") else own


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    if hint is float:
        return lambda stored: math.nan if stored is None else stored
    if hint is bool:
        return bool
    if hint == U64:
        return lambda stored: int.from_bytes(stored, "little")
    parts = get_args(hint) if NoneType in get_args(hint) else (hint,)
    if any(get_origin(each) is tuple for each in parts):
        return lambda stored: tuple(json.loads(stored))
    if any(get_origin(each) is Mapping for each in parts):
        return _map
    return None


def _map(stored: str | None) -> Any:
    if stored == "{}":
        return {}  # of most devices
    return None if stored is None else json.loads(stored)


def _stored(value: Any, hint: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, (Mapping, tuple)):
        return packed(value)
    return value.to_bytes(8, "little") if hint == U64 else value


def packed(value: Mapping[str, Any] | tuple[Any, ...]) -> str:
    """As a map or a tuple is stored."""
    return json.dumps(dict(value) if isinstance(value, Mapping) else value, sort_keys=True)


# In SQLite's words; ``postgres`` has a word of its own for each type. A change of the tables after
# a release is a new version, and begins at ``require_version``, unless it is a column that may be
# NULL or has a default: ``added_columns`` gives it to a store that an earlier release made.

SCHEMA_VERSION = 1
_TYPES = {int: "INTEGER", bool: "INTEGER", float: "REAL", bytes: "BLOB"}


@dataclass(frozen=True, slots=True)
class Shape:
    """A table: the declared type of each column, in their order, and the columns of its key.

    ``rest``: what stands behind a column's type. ``has_rowid``: of SQLite.
    """

    columns: Mapping[str, str]
    key: tuple[str, ...]
    rest: Mapping[str, str]
    has_rowid: bool

    def definition(self, name: str) -> str:
        """The statement that makes it."""
        columns = [f"{each} {kind}{self.rest[each]}" for each, kind in self.columns.items()]
        ends = "STRICT" if self.has_rowid else "STRICT, WITHOUT ROWID"
        inside = ", ".join([*columns, f"PRIMARY KEY ({', '.join(self.key)})"])
        return f"CREATE TABLE {name} ({inside}) {ends}"


def _table(key: str, *parts: type[Any] | str, has_rowid: bool = True) -> Shape:
    """Of the columns of classes of rows, and such as ``name TEXT, value REAL NULL``; those named in
    ``key`` are its key."""
    types: dict[str, str] = {}
    rest: dict[str, str] = {}
    for part in parts:
        if isinstance(part, str):
            for said in part.split(", "):
                name, types[name], *more = said.split(" ", 2)
                rest[name] = {"": " NOT NULL", "NULL": ""}.get(" ".join(more), f" {' '.join(more)}")
            continue
        defaults = _defaults(part)
        for own, name, hint in columns_of(part).written:
            types[name], nullable = _type(hint)
            nullable |= defaults.get(own) != defaults.get(own)  # by default it is not defined
            rest[name] = "" if nullable else f" NOT NULL{_default(defaults.get(own))}"
    return Shape(types, tuple(key.split()), rest, has_rowid)


def _of_task(key: str, *parts: type[Any] | str, has_rowid: bool = True) -> Shape:
    return _table(f"task {key}", "task INTEGER", *parts, has_rowid=has_rowid)


def _defaults(kind: Any) -> dict[str, Any]:
    if not is_dataclass(kind):
        return dict(kind._field_defaults)
    given = {each.name: default_of(each) for each in fields(kind)}
    return {name: each for name, each in given.items() if each is not MISSING}


def _default(value: Any) -> str:
    if value is None:
        return ""
    stored = _stored(value, None)
    return f" DEFAULT '{stored}'" if isinstance(stored, str) else f" DEFAULT {stored}"


def _type(hint: Any) -> tuple[str, bool]:
    """A field's column type, and whether it may be NULL."""
    if hint == U64:
        return "BLOB", False
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    nullable = NoneType in get_args(hint)
    (bare, *_) = [each for each in get_args(hint) if each is not NoneType] if nullable else [hint]
    return _TYPES.get(bare, "TEXT"), nullable


_SEEN = "device_id BLOB, seen_unix INTEGER"
_FIGURE_NULL = "value REAL NULL, error_bound REAL NULL, median REAL NULL"

TABLES: Mapping[str, Shape] = {
    "facts": _table("name", "name TEXT, value ANY"),
    "descriptors": _table("serial", IssuedDescriptor),
    "group_keys": _table("epoch", GroupKey),
    "tokens": _table("token_id", TokenRow, "created_unix INTEGER"),
    "devices": _table("device_id", DeviceRow, "handle BLOB NOT NULL UNIQUE"),
    "tasks": _table("task", TaskRow, "name TEXT UNIQUE"),
    "task_facts": _of_task("name", "name TEXT, value ANY"),
    "rounds": _of_task("round", RoundRow, "closed_served_seconds REAL NULL"),
    "updates": _of_task("seq", LoggedUpdate, "quarantined TEXT NULL"),
    "verdicts": _of_task("generation round device_id", StoredVerdict, has_rowid=False),
    "reports": _of_task("generation round device_id", StoredReport, has_rowid=False),
    "participations": _of_task("device_id", "device_id BLOB", LastParticipation, has_rowid=False),
    "habits": _of_task("device_id", "device_id BLOB", Habit, has_rowid=False),
    "sightings": _table("device_id", _SEEN, has_rowid=False),
    "clashes": _table("device_id", _SEEN, has_rowid=False),
    "checkpoints": _of_task("kind", StoredCheckpoint),
    "publications": _table(
        "topic", "topic TEXT, task INTEGER, part TEXT, place INTEGER, message BLOB NULL"
    ),
    # The model is last: what stands behind it cannot be read without it.
    "versions": _of_task("version", VersionRow, "awaited INTEGER, model BLOB NULL"),
    "device_evaluations": _of_task(
        "version device_id", "version INTEGER", DeviceEvaluation, has_rowid=False
    ),
    "figures": _of_task(
        "version stage metric part",
        *("version INTEGER, round INTEGER", Figure, _FIGURE_NULL),
        has_rowid=False,
    ),
    "refusals": _table("reason", "reason TEXT, count INTEGER"),
    "lease": _table("one", "one INTEGER", LeaseRow),
    "workers": _table("slot", WorkerRow),
    "shares": _of_task("round slot", ShareRow),
    "late_arrivals": _of_task("device_id", "device_id BLOB, seconds REAL NULL", has_rowid=False),
    "freshness": _table("sender", "sender BLOB, counter BLOB", has_rowid=False),
    "device_changes": _table("revision", "revision INTEGER, device_id BLOB"),
}
"""Each table, by its name."""

SCHEMA: Sequence[str] = (
    *(shape.definition(name) for name, shape in TABLES.items()),
    "CREATE INDEX remembered ON rounds (task, round) WHERE forgotten = 0",
    "CREATE INDEX awaited_versions ON versions (task) WHERE awaited = 1",
    "INSERT INTO tasks (task, state, file) VALUES (1, 'active', 'task.toml')",
)
"""What makes a store."""


def added_columns(table: str, found: Collection[str]) -> list[str]:
    """The statements that give a store's table the columns that it lacks, beside those found."""
    shape = TABLES[table]
    return [
        f"ALTER TABLE {table} ADD COLUMN {name} {kind}{shape.rest[name]}"
        for name, kind in shape.columns.items()
        if name not in found
    ]


def or_replace(table: str) -> str:
    """The end of an ``INSERT`` of whole rows that puts each in the place of one of its key."""
    shape = TABLES[table]
    others = ", ".join(
        f"{each} = excluded.{each}" for each in shape.columns if each not in shape.key
    )
    return f"ON CONFLICT ({', '.join(shape.key)}) DO UPDATE SET {others}"


def require_version(where: str, version: int) -> None:
    """Raises AggregatorError for a store that another version of the product made."""
    if version != SCHEMA_VERSION:
        raise AggregatorError(
            f"{where} has store format {version}, and this version of tessera-edge reads "
            f"{SCHEMA_VERSION}: install the newer version that made it; where a development "
            "version made it (before 0.1.0), make the home anew (tessera-aggregator init)"
        )
