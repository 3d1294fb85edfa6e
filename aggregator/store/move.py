"""A store into another: how a fleet that outgrew its file goes on in a database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aggregator.store.database import Database
from aggregator.store.schema import TABLES, Shape


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
                _rows(source, target, f"SELECT {columns} FROM {table}", shape),
            )


def _rows(source: Database, target: Database, query: str, shape: Shape) -> Iterator[list[Any]]:
    any_places = [place for place, kind in enumerate(shape.columns.values()) if kind == "ANY"]
    for row in source.rows(query):
        values = list(row)
        for place in any_places:
            values[place] = target.to_any(source.from_any(values[place]))
        yield values
