"""The store as one SQLite file: how it is made, opened and written to."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from aggregator.errors import AggregatorError, StoreAway, StoreOutdated
from aggregator.store.database import ALONE_WITHIN_SHARED, HELD_OUTSIDE, Database
from aggregator.store.schema import (
    SCHEMA,
    SCHEMA_VERSION,
    TABLES,
    added_columns,
    require_version,
)
from device_sdk.system.files import SQLITE_FLUSH_PRAGMAS
from device_sdk.system.lock import FileLock, ForkedError, LockedConnection

_APPLICATION_ID = 0x54455341  # "TESA"; development versions, before 0.1.0, had another
_BUSY_SECONDS = 10.0
_WHOLE = ("BEGIN IMMEDIATE", "COMMIT", ("ROLLBACK",))
_NESTED = ("SAVEPOINT nested", "RELEASE nested", ("ROLLBACK TO nested", "RELEASE nested"))
_LOCK_POLL_SECONDS = 0.002
# 64 MB of log: what is written back to the file again and again (the verdicts' tree) is written
# once for many groups.
_CHECKPOINT_PAGES = 16_000
_HELD = "another process has been writing to it for long"


class SQLiteDatabase(Database):
    """A file in write-ahead mode. Every commit is on disk when :meth:`transaction` ends.

    The operator's commands write to the same file while the server runs: writers wait for each
    other, and :meth:`changed_elsewhere` tells when to look again.

    Whoever writes, or moves the write-ahead log into the file, holds a lock of ours meanwhile.
    SQLite's own would do but for an error in its versions 3.7.0 to 3.51.2: a commit of one
    connection in the midst of another's checkpoint may lose pages (sqlite.org/wal.html, "The
    WAL-Reset Bug"). So no two of the two ever meet here, whichever SQLite this Python came with.
    Reading takes no lock but the connection's own, of threads (``LockedConnection``): Python asks a
    connection what its last call came to, and would be told of another thread's.
    """

    def __init__(self, path: Path, *, create: bool = False, read_only: bool = False) -> None:
        self.where = str(path)
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
        try:
            self._write_lock = FileLock(path.with_name(f"{path.name}.lock"))
        except OSError as error:
            raise AggregatorError(f"{path} cannot be used: {error}") from None
        try:
            self._file = LockedConnection(path, cached_statements=256)
        except ForkedError as error:
            self._write_lock.close()
            raise AggregatorError(str(error)) from None
        try:
            with self._file as connection:
                self._prepare(connection.execute, path, create, read_only)
        except sqlite3.DatabaseError as error:
            self.close()
            raise AggregatorError(f"{path} cannot be used: {error}") from None
        except AggregatorError:
            self.close()
            raise
        self._shared = False
        self._seen_version = self._data_version()

    def _prepare(
        self, run: Callable[[str], sqlite3.Cursor], path: Path, create: bool, read_only: bool
    ) -> None:
        run(f"PRAGMA busy_timeout = {int(1000 * _BUSY_SECONDS)}")
        if not create:
            # Before anything is written: a file that is not ours stays as it is.
            if run("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
                raise AggregatorError(
                    f"{path} is no aggregator's database, or one that a development version made "
                    "(before 0.1.0): make the home anew (tessera-aggregator init)"
                )
            require_version(str(path), run("PRAGMA user_version").fetchone()[0])
        if read_only:
            run("PRAGMA query_only = ON")
            if _lacking(run):
                raise StoreOutdated(str(path))
            return
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        for pragma in SQLITE_FLUSH_PRAGMAS:
            run(pragma)
        run("PRAGMA foreign_keys = ON")
        # KiB: what the close of a usual round writes goes to the log once, when it commits.
        run("PRAGMA cache_size = -8192")
        # What is deleted is overwritten; see also erase_deleted.
        run("PRAGMA secure_delete = ON")
        # Checkpoints happen within a COMMIT, so under the lock.
        run(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        if create:
            with self.transaction():
                for statement in SCHEMA:
                    run(statement)
                run(f"PRAGMA application_id = {_APPLICATION_ID}")
                run(f"PRAGMA user_version = {SCHEMA_VERSION}")
            return
        if lacking := _lacking(run):
            with self.transaction():
                for statement in lacking:
                    run(statement)

    @contextmanager
    def _transaction(self, shared: bool) -> Iterator[None]:
        # There is one writer at a time, shared or not.
        with self._file as connection:
            run, nested = connection.execute, connection.in_transaction
            if not nested:
                self._shared = shared
            elif self._shared and not shared:
                raise RuntimeError(ALONE_WITHIN_SHARED)
            begin, commit, rollback = _NESTED if nested else _WHOLE
            with nullcontext() if nested else self._alone():
                with nullcontext() if nested else _lock_is_waited_for():
                    run(begin)
                try:
                    if not nested:
                        self.guard()
                    yield
                    run(commit)
                except BaseException:
                    # A full disk may have rolled back already, or have left the transaction open:
                    # rolling back what is not there would hide the error that says what is wrong.
                    if connection.in_transaction:
                        for each in rollback:
                            run(each)
                    raise

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """See :class:`Database`."""
        with self._file as connection:
            if connection.in_transaction:
                return connection.execute(sql, values).rowcount
            with self.transaction():
                return connection.execute(sql, values).rowcount

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """See :class:`Database`."""
        with self._file as connection:
            if connection.in_transaction:
                connection.executemany(sql, rows)
                return
            with self.transaction():
                connection.executemany(sql, rows)

    def erase_deleted(self) -> bool:
        """Leave nothing in the file or its log of what was deleted; whether that was possible.

        ``secure_delete`` overwrites deleted rows in new versions of their pages, but the log holds
        the versions before, and the file too until the log was moved into it. Not possible while
        another process reads, or on a full disk: to be tried again.
        """
        with self._file as connection, self._alone():
            # No waiting for readers: the server has other things to do.
            connection.execute("PRAGMA busy_timeout = 0")
            try:
                row = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.OperationalError:
                return False  # what must be on the disk is there: a commit says what is wrong
            finally:
                connection.execute(f"PRAGMA busy_timeout = {int(1000 * _BUSY_SECONDS)}")
        return bool(row[0] == 0)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """See :class:`Database`: all of them are in memory. A query that is left open holds the
        connection to what it began with: once another process has committed, no write would begin
        here, and nobody would hear of it."""
        yield from self._file.rows(sql, *values)

    def row(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """See :class:`Database`."""
        return self._file.row(sql, *values)

    def hold(
        self, sql: str, values: Sequence[Any] = (), *, shared: bool = False
    ) -> tuple[Any, ...] | None:
        """See :class:`Database`. A transaction is the only one: all rows are held."""
        with self._file as connection:
            if not connection.in_transaction:
                raise RuntimeError(HELD_OUTSIDE)
            return self.row(sql, values)

    def now(self) -> float:
        """See :class:`Database`: this machine's clock, to a millisecond."""
        row = self.row("SELECT (julianday('now') - 2440587.5) * 86400.0")
        assert row is not None
        return float(row[0])

    def changed_elsewhere(self) -> bool:
        """See :class:`Database`."""
        version = self._data_version()
        changed = version != self._seen_version
        self._seen_version = version
        return changed

    def close(self) -> None:
        """See :class:`Database`."""
        # The last one to close moves the log into the file and removes it. SQLite does that only
        # where no other connection is left.
        self._file.close()
        self._write_lock.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        patience = _BUSY_SECONDS
        while not self._write_lock.try_acquire():
            if patience <= 0.0:
                raise StoreAway(_HELD)
            time.sleep(_LOCK_POLL_SECONDS)
            patience -= _LOCK_POLL_SECONDS
        try:
            yield
        finally:
            self._write_lock.release()

    def _data_version(self) -> int:
        row = self.row("PRAGMA data_version")
        assert row is not None
        return int(row[0])


def _lacking(run: Callable[[str], sqlite3.Cursor]) -> list[str]:
    """What adds the columns that a file of an earlier release has not."""
    return [
        statement
        for table in TABLES
        for statement in added_columns(
            table, [row[1] for row in run(f"PRAGMA table_info({table})")]
        )
    ]


@contextmanager
def _lock_is_waited_for() -> Iterator[None]:
    """Whoever holds SQLite's own lock without ours is no program of this package: an editor of
    databases, a backup. Raises StoreAway for it, as for one of ours."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise StoreAway(_HELD) from None
        raise
