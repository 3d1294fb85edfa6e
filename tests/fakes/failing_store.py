"""A store's connection whose statements fail when a test says so."""

from __future__ import annotations

import sqlite3
from typing import Any

from aggregator.store import OutcomeUnknown, SQLiteDatabase, Store


class FailingConnection:
    """In the place of a SQLite store's connection.

    ``fails``: how the statements begin that fail from now on, each once and in this order.
    ``answer_lost``: whether the next commit is done, and looks as if nobody could tell.
    """

    def __init__(self, store: Store) -> None:
        database = store.database
        assert isinstance(database, SQLiteDatabase)
        self._real: Any = database._file._connection
        database._file._connection = self  # type: ignore[assignment]
        self.fails: list[str] = []
        self.answer_lost = False

    def execute(self, sql: str, *values: Any) -> Any:
        if self.fails and sql.startswith(self.fails[0]):
            self.fails.pop(0)
            raise sqlite3.OperationalError("disk I/O error")
        found = self._real.execute(sql, *values)
        if sql == "COMMIT" and self.answer_lost:
            self.answer_lost = False
            raise OutcomeUnknown("the answer was lost")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
