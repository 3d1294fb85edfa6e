"""A store into another: how a fleet that outgrew its file goes on in a database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aggregator.store.database import Database
from aggregator.store.schema import TABLES, Shape

_ROWS_AT_ONCE = 16


def copy_store(source: Database, target: Database) -> None:
    """All rows of a store into one that was just made, of whichever engine; all or nothing. Nobody
    writes to the source meanwhile."""
    with source.transaction(), target.transaction():
        for table, shape in TABLES.items():
            target.execute(f"DELETE FROM {table}")
            columns = ", ".join(shape.columns)
            places = ", ".join("?" * len(shape.columns))
            target.execute_many(
                f"INSERT INTO {table} ({columns}) VALUES ({places})",
                _rows(source, target, table, shape),
            )


def _rows(source: Database, target: Database, table: str, shape: Shape) -> Iterator[list[Any]]:
    """In the order of their keys, a few at a time: what they hold may be large."""
    any_places = [place for place, kind in enumerate(shape.columns.values()) if kind == "ANY"]
    key, names = ", ".join(shape.key), [*shape.columns]
    last: list[Any] = []
    after = ""
    while page := list(
        source.rows(
            f"SELECT {', '.join(names)} FROM {table} {after} ORDER BY {key} LIMIT {_ROWS_AT_ONCE}",
            last,
        )
    ):
        last = [page[-1][names.index(each)] for each in shape.key]
        after = f"WHERE ({key}) > ({', '.join('?' * len(last))})"
        for row in page:
            values = list(row)
            for place in any_places:
                values[place] = target.to_any(source.from_any(values[place]))
            yield values
