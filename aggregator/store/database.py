"""The SQLite file: how it is made, opened and written to."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from aggregator.errors import AggregatorError
from device_sdk.system.files import SQLITE_FLUSH_PRAGMAS
from device_sdk.system.lock import FileLock

# The tables. A change of them is a new version, with a step that brings an older file to it.

SCHEMA_VERSION = 5

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value ANY NOT NULL) STRICT;
CREATE TABLE descriptors (
    serial INTEGER PRIMARY KEY,
    message BLOB NOT NULL,
    honoured_until_unix INTEGER          -- NULL: the current one
) STRICT;
CREATE TABLE group_keys (epoch INTEGER PRIMARY KEY, key BLOB NOT NULL) STRICT;
CREATE TABLE tokens (
    token_id BLOB PRIMARY KEY,
    secret BLOB NOT NULL,
    created_unix INTEGER NOT NULL,
    expires_unix INTEGER NOT NULL,
    replaces BLOB,
    device_id BLOB,                      -- who used it
    strangers INTEGER NOT NULL DEFAULT 0,
    last_stranger BLOB,                  -- the key of the latest stranger who tried to
    name TEXT,                           -- of the device that will use it
    labels TEXT NOT NULL DEFAULT '{}'    -- JSON: likewise
) STRICT;
CREATE TABLE devices (
    device_id BLOB PRIMARY KEY,
    identity BLOB NOT NULL,
    handle BLOB NOT NULL UNIQUE,
    admission_key BLOB NOT NULL,         -- zeros once it is revoked
    shard INTEGER NOT NULL,
    token_id BLOB NOT NULL,
    enrolled_unix INTEGER NOT NULL,
    first_round INTEGER NOT NULL,        -- takes part from this opening on, see rounds.opening
    revoked_unix INTEGER,
    labels TEXT NOT NULL DEFAULT '{}',   -- JSON: what tasks choose their devices by
    name TEXT                            -- the operator's
) STRICT;
CREATE TABLE tasks (
    task INTEGER PRIMARY KEY,            -- 1: the first, whose file has the fleet's tables
    name TEXT UNIQUE,                    -- NULL: the first one, before it was served
    state TEXT NOT NULL,                 -- 'active', 'paused', 'retiring' or 'retired'
    file TEXT NOT NULL,                  -- the task file, relative to the home
    served TEXT,                         -- the file's text that the state belongs to
    unwritten TEXT,                      -- what the file is to hold, until it does
    request TEXT,                        -- JSON: what the operator wants it replaced by
    problem TEXT                         -- why it is not served, or not as the file says
) STRICT;
CREATE TABLE task_facts (
    task INTEGER NOT NULL,
    name TEXT NOT NULL,
    value ANY NOT NULL,
    PRIMARY KEY (task, name)
) STRICT;
CREATE TABLE rounds (
    task INTEGER NOT NULL,
    round INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    version INTEGER NOT NULL,            -- what its broadcast carries
    opened_unix REAL NOT NULL,
    deadline_unix REAL NOT NULL,
    seed BLOB NOT NULL,
    threshold BLOB NOT NULL,             -- 8 bytes little-endian: SQLite has no unsigned integers
    expected INTEGER NOT NULL,
    items INTEGER NOT NULL,
    closed_unix REAL,                    -- NULL: open
    next_version INTEGER,                -- NULL when the quorum was missed
    participants INTEGER,
    metrics TEXT,                        -- JSON
    arrivals BLOB,                       -- float32, seconds after the round opened
    held TEXT,                           -- why the round may not close
    forgotten INTEGER NOT NULL DEFAULT 0,
    closed_served_seconds REAL,          -- how long serve had run, in all, when it was seen closed
    opening INTEGER NOT NULL,            -- the how-manieth round of any task it was to open
    PRIMARY KEY (task, round)
) STRICT;
CREATE INDEX remembered ON rounds (task, round) WHERE forgotten = 0;
CREATE TABLE updates (                   -- the log: what is not part of a version yet
    task INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    round INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    arrived_seconds REAL NOT NULL,
    quarantined TEXT,                    -- why it could not be absorbed
    body BLOB NOT NULL,
    PRIMARY KEY (task, seq)
) STRICT;
CREATE TABLE verdicts (
    task INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    round INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    body_sha256 BLOB NOT NULL,
    reason TEXT,                         -- NULL: counted; 'noted': a report alone; else refused
    PRIMARY KEY (task, generation, round, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE reports (                   -- of the last rounds, see Reports
    task INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    round INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    outcome TEXT NOT NULL,
    reason TEXT NOT NULL,                -- empty where it trained
    sdk TEXT,                            -- NULL, like what follows, where the app keeps it
    runtime TEXT,
    platform TEXT,
    option TEXT,                         -- columns or artifact that was trained
    seconds REAL,
    received_bytes INTEGER,
    PRIMARY KEY (task, generation, round, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE participations (            -- each device's newest, in each task
    task INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    counted_unix INTEGER,                -- of its newest update that was counted
    width INTEGER,                       -- of that one; NULL: it had no columns
    told_unix INTEGER,                   -- when it told last how a round ended
    round INTEGER,                       -- which one
    report BLOB,                         -- as it came, without evaluation; NULL: revoked since
    PRIMARY KEY (task, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE checkpoints (
    task INTEGER NOT NULL,
    kind TEXT NOT NULL,                  -- 'version', or 'partial' within an open round
    round INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    version INTEGER NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (task, kind)
) STRICT;
CREATE TABLE publications (
    topic TEXT PRIMARY KEY,
    task INTEGER NOT NULL,
    part TEXT NOT NULL,                  -- 'attachment.ID', 'contents' or 'round'
    place INTEGER NOT NULL,              -- the order of sending
    message BLOB                         -- NULL: to be cleared from the broker
) STRICT;
CREATE TABLE versions (
    task INTEGER NOT NULL,
    version INTEGER NOT NULL,
    round INTEGER NOT NULL,              -- that made it; 0: the first one
    closed_unix REAL NOT NULL,
    devices INTEGER NOT NULL,
    artifact TEXT NOT NULL,              -- of its parameters, hexadecimal; empty: none
    origin TEXT NOT NULL,                -- of one that no round made
    bytes INTEGER NOT NULL,              -- of the model; 0: the method keeps none
    metrics TEXT NOT NULL,               -- JSON
    pinned INTEGER NOT NULL DEFAULT 0,
    awaited INTEGER NOT NULL DEFAULT 0,  -- to become the next version
    model BLOB,                          -- safetensors; NULL: dropped
    items INTEGER NOT NULL,              -- of the catalogue, that it has vectors of
    PRIMARY KEY (task, version)
) STRICT;
CREATE INDEX awaited_versions ON versions (task) WHERE awaited = 1;
CREATE TABLE device_evaluations (        -- until their version is followed by another
    task INTEGER NOT NULL,
    version INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    part TEXT NOT NULL,                  -- its capacity class; empty: none named
    report BLOB NOT NULL,
    PRIMARY KEY (task, version, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE figures (
    task INTEGER NOT NULL,
    version INTEGER NOT NULL,
    stage TEXT NOT NULL,
    metric TEXT NOT NULL,
    part TEXT NOT NULL,                  -- empty: the fleet
    round INTEGER NOT NULL,              -- the last one that evaluated the version
    devices INTEGER NOT NULL,
    samples REAL NOT NULL,
    capped INTEGER NOT NULL,
    value REAL,                          -- NULL: the statistics do not define it, here and below
    error_bound REAL,
    median REAL,
    deciles TEXT NOT NULL,               -- JSON
    PRIMARY KEY (task, version, stage, metric, part)
) STRICT, WITHOUT ROWID;
CREATE TABLE refusals (reason TEXT PRIMARY KEY, count INTEGER NOT NULL) STRICT;
"""
FIRST_TASK = """
INSERT INTO tasks (task, state, file) VALUES (1, 'active', 'task.toml')
"""

_TASK_TABLES = ("rounds", "updates", "verdicts", "checkpoints", "publications")


def _table_of(name: str) -> str:
    """The statements that make a table of the present schema, with its indices."""
    found = [each for each in SCHEMA.split(";\n") if re.search(rf"(TABLE|ON) {name} \(", each)]
    return "".join(f"{each};\n" for each in found)


def _renamed(name: str) -> str:
    return f"ALTER TABLE {name} RENAME TO old_{name};\n"


def _copied(name: str, columns: str, values: str) -> str:
    return (
        f"INSERT INTO {name} ({columns}) SELECT {values} FROM old_{name};\nDROP TABLE old_{name};\n"
    )


def _one_task_becomes_the_first() -> str:
    """What there is belongs to the one task that a home had, task 1 from now on."""
    rounds = (
        "round, generation, version, opened_unix, deadline_unix, seed, threshold, expected, "
        "items, closed_unix, next_version, participants, metrics, arrivals, held, forgotten, "
        "closed_served_seconds"
    )
    updates = "seq, round, device_id, arrived_seconds, quarantined, body"
    verdicts = "generation, round, device_id, body_sha256, reason"
    checkpoints = "kind, round, seq, version, state"
    publications = "topic, part, place, message"
    moved = "('task', 'catalogue', 'sealed_contents', 'unpublished', 'attachments')"
    return "".join(
        (
            "DROP INDEX remembered;\n",
            "INSERT OR REPLACE INTO facts SELECT 'openings', coalesce(max(round), 0) "
            "FROM rounds;\n",
            *(_renamed(name) for name in _TASK_TABLES),
            *(
                _table_of(name)
                for name in (
                    *_TASK_TABLES,
                    "tasks",
                    "task_facts",
                    "versions",
                    "reports",
                    "device_evaluations",
                    "figures",
                )
            ),
            _copied("rounds", f"task, {rounds}, opening", f"1, {rounds}, round"),
            _copied("updates", f"task, {updates}", f"1, {updates}"),
            _copied("verdicts", f"task, {verdicts}", f"1, {verdicts}"),
            _copied("checkpoints", f"task, {checkpoints}", f"1, {checkpoints}"),
            _copied("publications", f"task, {publications}", f"1, {publications}"),
            f"INSERT INTO task_facts SELECT 1, name, value FROM facts WHERE name IN {moved};\n",
            "INSERT INTO task_facts SELECT 1, 'key_epoch', "
            "CAST(substr(value, 1, instr(value, ' ') - 1) AS INTEGER) FROM facts "
            "WHERE name = 'sealed_contents' AND value != '';\n",
            f"DELETE FROM facts WHERE name IN {moved};\n",
            FIRST_TASK.strip() + ";\n",
            "UPDATE tasks SET name = (SELECT substr(value, 1, instr(value, ' ') - 1) "
            "FROM task_facts WHERE name = 'task');\n",
            "ALTER TABLE devices ADD COLUMN labels TEXT NOT NULL DEFAULT '{}';\n",
            "ALTER TABLE devices ADD COLUMN name TEXT;\n",
            "ALTER TABLE devices ADD COLUMN last_report_unix INTEGER;\n",
            "ALTER TABLE devices ADD COLUMN last_report BLOB;\n",
            "ALTER TABLE tokens ADD COLUMN name TEXT;\n",
            "ALTER TABLE tokens ADD COLUMN labels TEXT NOT NULL DEFAULT '{}';\n",
        )
    )


def _devices_did_something_in_a_task() -> str:
    """What was kept once for each device is of the task whose round it told of last, or the first:
    of others it is known when the device tells of them again."""
    dropped = ("last_counted_unix", "last_width", "last_report_unix", "last_report")
    return "".join(
        (
            _table_of("participations"),
            "INSERT INTO participations "
            "(task, device_id, counted_unix, width, told_unix, round, report) "
            "SELECT coalesce(newest.task, 1), devices.device_id, last_counted_unix, last_width, "
            "last_report_unix, newest.round, last_report FROM devices LEFT JOIN "
            "(SELECT reports.device_id, task, round, max(opening) FROM reports "
            "JOIN rounds USING (task, round) GROUP BY reports.device_id) AS newest "
            "ON newest.device_id = devices.device_id "
            "WHERE last_counted_unix IS NOT NULL OR last_report_unix IS NOT NULL;\n",
            *(f"ALTER TABLE devices DROP COLUMN {each};\n" for each in dropped),
        )
    )


STEPS = {
    1: """
ALTER TABLE rounds ADD COLUMN closed_served_seconds REAL;
CREATE INDEX remembered ON rounds (round) WHERE forgotten = 0;
UPDATE devices SET admission_key = zeroblob(32) WHERE revoked_unix IS NOT NULL;
""",
    # Checkpoints of before are read as they are; those from now on are safetensors.
    2: "",
    3: _one_task_becomes_the_first(),
    4: _devices_did_something_in_a_task(),
}
"""By the version that a file has, what makes it one of the next version."""

WITHOUT_ERASING = frozenset((1,))
"""Versions whose programs freed what they deleted, and did not overwrite it."""


STORE_FAILURES = (sqlite3.Error, OSError)
"""What the disk does: a full one, say. It is no fault of what was to be written."""

_APPLICATION_ID = 0x54455353  # "TESS"
_BUSY_SECONDS = 10.0
_WHOLE = ("BEGIN IMMEDIATE", "COMMIT", ("ROLLBACK",))
_NESTED = ("SAVEPOINT nested", "RELEASE nested", ("ROLLBACK TO nested", "RELEASE nested"))
_LOCK_POLL_SECONDS = 0.002
# 64 MB of log: what is written back to the file again and again (the verdicts' tree) is written
# once for many groups.
_CHECKPOINT_PAGES = 16_000


class Database:
    """One connection. Every commit is on disk when :meth:`transaction` ends.

    The operator's commands write to the same file while the server runs: writers wait for each
    other, and :meth:`changed_elsewhere` tells when to look again.

    Whoever writes, or moves the write-ahead log into the file, holds a lock of ours meanwhile.
    SQLite's own would do but for an error in its versions 3.7.0 to 3.51.2: a commit of one
    connection in the midst of another's checkpoint may lose pages (sqlite.org/wal.html, "The
    WAL-Reset Bug"). So no two of the two ever meet here, whichever SQLite this Python came with.
    Reading takes no lock.

    A file of an older version is made one of this within ``taken_over_in()``.
    """

    def __init__(
        self,
        path: Path,
        *,
        create: bool = False,
        taken_over_in: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
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
        self._connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            self._prepare(path, create, taken_over_in)
        except sqlite3.DatabaseError as error:
            self.close()
            raise AggregatorError(f"{path} cannot be used: {error}") from None
        except AggregatorError:
            self.close()
            raise
        self._seen_version = self._data_version()

    def _prepare(
        self, path: Path, create: bool, taken_over_in: Callable[[], AbstractContextManager[None]]
    ) -> None:
        run = self._connection.execute
        run(f"PRAGMA busy_timeout = {int(1000 * _BUSY_SECONDS)}")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        for pragma in SQLITE_FLUSH_PRAGMAS:
            run(pragma)
        run("PRAGMA foreign_keys = ON")
        # What is deleted is overwritten; see also erase_deleted.
        run("PRAGMA secure_delete = ON")
        # Checkpoints happen within a COMMIT, so under the lock.
        run(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        if create:
            with self.transaction():
                self._run_script(SCHEMA + FIRST_TASK)
                run(f"PRAGMA application_id = {_APPLICATION_ID}")
                run(f"PRAGMA user_version = {SCHEMA_VERSION}")
        if run("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
            raise AggregatorError(f"{path} is no aggregator's database")
        if (version := self._version()) != SCHEMA_VERSION:
            with taken_over_in() if version in STEPS else nullcontext():
                self._migrate(path)

    def _migrate(self, path: Path) -> None:
        if self._version() in WITHOUT_ERASING:
            # Its free pages hold updates and keys. First: after a crash it is done again.
            with self._alone():
                self._connection.execute("VACUUM")
        with self.transaction():
            # Read again: another process may have done it meanwhile.
            while (version := self._version()) != SCHEMA_VERSION:
                if version not in STEPS:
                    raise AggregatorError(
                        f"{path} has schema version {version}, this program reads up to "
                        f"{SCHEMA_VERSION}: install a newer one"
                    )
                self._run_script(STEPS[version])
                self._connection.execute(f"PRAGMA user_version = {version + 1}")

    def _run_script(self, script: str) -> None:
        for statement in script.split(";\n"):
            self._connection.execute(statement)

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, durable at the end; one within another, at the other's end."""
        run = self._connection.execute
        nested = self._connection.in_transaction
        begin, commit, rollback = _NESTED if nested else _WHOLE
        with nullcontext() if nested else self._alone():
            run(begin)
            try:
                yield
                run(commit)
            except BaseException:
                # A full disk may have rolled back already, or have left the transaction open:
                # rolling back what is not there would hide the error that says what is wrong.
                if self._connection.in_transaction:
                    for each in rollback:
                        run(each)
                raise

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run one statement that writes; the number of rows it changed.

        Outside of a transaction it is one by itself.
        """
        if self._connection.in_transaction:
            return self._connection.execute(sql, values).rowcount
        with self.transaction():
            return self._connection.execute(sql, values).rowcount

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each of many rows, as :meth:`execute` does."""
        if self._connection.in_transaction:
            self._connection.executemany(sql, rows)
            return
        with self.transaction():
            self._connection.executemany(sql, rows)

    def erase_deleted(self) -> bool:
        """Leave nothing in the file or its log of what was deleted; whether that was possible.

        ``secure_delete`` overwrites deleted rows in new versions of their pages, but the log holds
        the versions before, and the file too until the log was moved into it. Not possible while
        another process reads, or on a full disk: to be tried again.
        """
        with self._alone():
            # No waiting for readers: the server has other things to do.
            self._connection.execute("PRAGMA busy_timeout = 0")
            try:
                row = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.OperationalError:
                return False  # what must be on the disk is there: a commit says what is wrong
            finally:
                self._connection.execute(f"PRAGMA busy_timeout = {int(1000 * _BUSY_SECONDS)}")
        return bool(row[0] == 0)

    def insert(self, table: str, *values: Any, replace: bool = False) -> None:
        """Add a row of all the table's columns, in their order; ``replace``: one of that key."""
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        places = ", ".join("?" * len(values))
        self.execute(f"{verb} INTO {table} VALUES ({places})", values)

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
        """Close; the file is whole without this too. May be called twice."""
        # The last one to close moves the log into the file and removes it. SQLite does that only
        # where no other connection is left.
        self._connection.close()
        self._write_lock.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        patience = _BUSY_SECONDS
        while not self._write_lock.try_acquire():
            if patience <= 0.0:
                raise sqlite3.OperationalError("another process has been writing to it for long")
            time.sleep(_LOCK_POLL_SECONDS)
            patience -= _LOCK_POLL_SECONDS
        try:
            yield
        finally:
            self._write_lock.release()

    def _data_version(self) -> int:
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])


class Table:
    """What asks and writes one table, or two that go together, in the database that all share."""

    def __init__(self, database: Database) -> None:
        self._database = database


class TableOfTask(Table):
    """One task's rows of such a table."""

    def __init__(self, database: Database, task: int) -> None:
        super().__init__(database)
        self._task = task
