"""The SQLite file: how it is made, opened and written to."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aggregator.errors import AggregatorError
from aggregator.store.schema import SCHEMA, SCHEMA_VERSION

__all__ = ["STORE_FAILURES", "Database"]

STORE_FAILURES = (sqlite3.Error, OSError)
"""What the disk does: a full one, say. It is no fault of what was to be written."""

_APPLICATION_ID = 0x54455353  # "TESS"
_BUSY_MILLISECONDS = 10_000
# 64 MB of log: what is written back to the file again and again (the verdicts' tree) is written
# once for many groups.
_CHECKPOINT_PAGES = 16_000


class Database:
    """One connection. Every commit is on disk when :meth:`transaction` ends.

    The operator's commands write to the same file while the server runs: writers wait for each
    other, and :meth:`changed_elsewhere` tells when to look again.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            # Made by us first, so that nobody else can ever read it: it holds secrets. SQLite gives
            # its journals the same mode.
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            except FileExistsError:
                raise AggregatorError(f"{path} exists already") from None
        elif not path.exists():
            raise AggregatorError(
                f"{path} does not exist; run tessera-aggregator init --home {path.parent} first"
            )
        self._connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            self._prepare(path, create)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise AggregatorError(f"{path} cannot be used: {error}") from None
        except AggregatorError:
            self._connection.close()
            raise
        self._seen_version = self._data_version()

    def _prepare(self, path: Path, create: bool) -> None:
        run = self._connection.execute
        run(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA foreign_keys = ON")
        run(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        if create:
            with self.transaction():
                for statement in SCHEMA.split(";\n"):
                    run(statement)
                run(f"PRAGMA application_id = {_APPLICATION_ID}")
                run(f"PRAGMA user_version = {SCHEMA_VERSION}")
        ours = run("PRAGMA application_id").fetchone()[0] == _APPLICATION_ID
        version = run("PRAGMA user_version").fetchone()[0]
        if not ours:
            raise AggregatorError(f"{path} is no aggregator's database")
        if version != SCHEMA_VERSION:
            raise AggregatorError(
                f"{path} has schema version {version}; this program reads {SCHEMA_VERSION}"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, durable at the end. Not to be nested."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # A full disk may have rolled back already, or have left the transaction open: rolling
            # back what is not there would hide the error that says what is wrong.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run one statement; the number of rows it changed."""
        return self._connection.execute(sql, values).rowcount

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each of many rows."""
        self._connection.executemany(sql, rows)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, one at a time."""
        yield from self._connection.execute(sql, values)

    def row(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """The first row of a query, or None."""
        found: tuple[Any, ...] | None = self._connection.execute(sql, values).fetchone()
        return found

    def changed_elsewhere(self) -> bool:
        """Whether another process committed since the last call. Costs a few microseconds."""
        version = self._data_version()
        changed = version != self._seen_version
        self._seen_version = version
        return changed

    def close(self) -> None:
        """Close; the file is whole without this too."""
        self._connection.close()

    def _data_version(self) -> int:
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
