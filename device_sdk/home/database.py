"""The home folder's SQLite file: schema, durability, one lock for the device's threads, and the
bytes of named arrays in a cell."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact import safetensors
from device_sdk.artifact.errors import ArtifactError
from device_sdk.errors import HomeBroken, HomeError
from device_sdk.system.files import SQLITE_FLUSH_PRAGMAS
from device_sdk.system.lock import ForkedError, LockedConnection
from device_sdk.wire.arrays.tensors import BeyondWire

SCHEMA_VERSION = 1
"""A change of the tables after a release is a new version, and begins where it is required."""
_APPLICATION_ID = 0x54455348  # "TESH"; development versions, before 0.1.0, set none
# Pages of the file that stay in memory. A device reads little and seldom, and the kernel keeps the
# file too; SQLite's own 2 MB would fill up over the rounds.
_CACHE_KIB = 64

_SCHEMA = """
CREATE TABLE membership (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    way TEXT NOT NULL, prefix TEXT NOT NULL, task TEXT NOT NULL, cohort TEXT NOT NULL,
    root_fingerprint BLOB NOT NULL, device_id BLOB NOT NULL, handle BLOB NOT NULL,
    admission_key BLOB NOT NULL, shard INTEGER NOT NULL,
    least_serial INTEGER NOT NULL DEFAULT 0,
    has_left INTEGER NOT NULL DEFAULT 0,
    is_wish INTEGER NOT NULL DEFAULT 1,
    cell TEXT NOT NULL DEFAULT '',
    mirror TEXT NOT NULL DEFAULT '', moves TEXT NOT NULL DEFAULT '{}');
CREATE TABLE descriptor (
    one INTEGER PRIMARY KEY CHECK (one = 1), message BLOB NOT NULL);
CREATE TABLE clock (
    one INTEGER PRIMARY KEY CHECK (one = 1), largest_unix_seconds INTEGER NOT NULL);
CREATE TABLE request_counter (
    one INTEGER PRIMARY KEY CHECK (one = 1), highest INTEGER NOT NULL,
    unanswered INTEGER NOT NULL);
CREATE TABLE user (place INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE mark (
    task TEXT NOT NULL, cohort TEXT NOT NULL, generation INTEGER NOT NULL,
    round INTEGER NOT NULL, version INTEGER NOT NULL, sha256 BLOB NOT NULL,
    PRIMARY KEY (task, cohort)) WITHOUT ROWID;
CREATE TABLE participation (
    number INTEGER PRIMARY KEY, task TEXT NOT NULL, generation INTEGER NOT NULL,
    round INTEGER NOT NULL, version INTEGER NOT NULL, outcome TEXT NOT NULL, detail TEXT NOT NULL,
    k INTEGER, train_seconds REAL, verdict TEXT, reason TEXT, artifact TEXT,
    items INTEGER, unknown_items INTEGER,
    UNIQUE (task, generation, round));
CREATE TABLE outbox (
    digest BLOB PRIMARY KEY, task TEXT NOT NULL, generation INTEGER NOT NULL,
    round INTEGER NOT NULL, body BLOB NOT NULL, report BLOB,
    UNIQUE (task, generation, round)) WITHOUT ROWID;
CREATE TABLE learner (
    task TEXT PRIMARY KEY, state BLOB NOT NULL, artifact BLOB, method TEXT) WITHOUT ROWID;
CREATE TABLE model (
    task TEXT PRIMARY KEY, generation INTEGER NOT NULL, round INTEGER NOT NULL,
    version INTEGER NOT NULL, catalogue_id BLOB NOT NULL, arrays BLOB NOT NULL,
    artifact BLOB) WITHOUT ROWID;
CREATE TABLE catalogue (id BLOB PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE capability (
    task TEXT PRIMARY KEY, conditions TEXT NOT NULL, option TEXT NOT NULL, size INTEGER NOT NULL,
    placement TEXT, placed_size INTEGER, misses INTEGER NOT NULL, reason TEXT NOT NULL,
    p90_seconds REAL) WITHOUT ROWID;
CREATE TABLE evaluation (
    task TEXT PRIMARY KEY, generation INTEGER NOT NULL, round INTEGER NOT NULL,
    version INTEGER NOT NULL, report BLOB NOT NULL, detail TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE interaction (
    task TEXT NOT NULL, user INTEGER NOT NULL REFERENCES user (place), item TEXT NOT NULL,
    number INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (task, user, item)) WITHOUT ROWID;
CREATE TABLE attachment (
    task TEXT NOT NULL, id BLOB NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (task, id)) WITHOUT ROWID;
CREATE TABLE task (
    name TEXT PRIMARY KEY, cohort TEXT NOT NULL, served INTEGER NOT NULL,
    generation INTEGER, method TEXT, takes TEXT, artifacts BLOB, owns_unnamed INTEGER
    ) WITHOUT ROWID;
CREATE TABLE spent (day INTEGER PRIMARY KEY, seconds REAL NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE trial (
    artifact BLOB PRIMARY KEY, passed INTEGER NOT NULL, strikes INTEGER NOT NULL,
    reason TEXT NOT NULL, detail TEXT NOT NULL, until_unix_seconds INTEGER NOT NULL) WITHOUT ROWID;
"""


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Named arrays as safetensors; float32 that float16 holds exactly takes half the bytes.

    The metadata say which dtype such an array comes back as. Raises :class:`BeyondWire` for values
    that are not finite; others are of no more account here (an optimizer's squares of raw gradients
    are large), and may not travel all the same.
    """
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BeyondWire(f"array {name!r}: a value is not finite")
    stored, dtypes = {}, {}
    for name in sorted(arrays):
        array = stored[name] = np.asarray(arrays[name])
        halves = _halves(array) if array.dtype == np.float32 else None
        if halves is not None:
            stored[name], dtypes[name] = halves, "float32"
    return safetensors.encode(stored, dtypes)


def _halves(array: NDArray[Any]) -> NDArray[Any] | None:
    """The array as float16, where that changes no value."""
    flat = array.reshape(-1)
    # What was trained in float32 mostly shows it at once: the rest need not be converted.
    for part in (flat[:64], flat):
        with np.errstate(over="ignore"):
            halves = part.astype(np.float16)
        if not (halves == part).all():
            return None
    return halves.reshape(array.shape)


def unpack_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of :func:`pack_arrays`, fresh and writable. Raises :class:`HomeBroken`."""
    try:
        found = safetensors.decode(data)
    except ArtifactError as error:
        raise HomeBroken(f"stored arrays are damaged: {error}") from None
    return {
        name: array.astype(found.metadata.get(name, array.dtype))
        for name, array in found.tensors.items()
    }


class HomeDatabase(LockedConnection):
    """The file, open.

    A commit has reached the disk when :meth:`transaction` ends (WAL, ``synchronous=FULL``). The
    file and its companions have mode 0600: they hold what users did, in plain.
    Raises :class:`HomeBroken`.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._depth = 0
        try:
            if not read_only:
                # SQLite gives its journal the mode of the file, but would make the file with 0644.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            super().__init__(path, timeout=10.0)
            with self as sql:
                self._prepare(sql, read_only)
        except ForkedError as error:
            raise HomeError(str(error)) from None
        except (OSError, sqlite3.Error) as error:
            raise HomeBroken(f"{path} cannot be used: {error}") from error

    def _prepare(self, sql: sqlite3.Connection, read_only: bool) -> None:
        sql.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        (version,) = sql.execute("PRAGMA user_version").fetchone()
        if version != 0:
            self._require_version(sql, version)
        if read_only:
            sql.execute("PRAGMA query_only = ON")
            if version == 0:
                raise HomeBroken(f"{self._path} is empty")
            return
        sql.execute("PRAGMA journal_mode = WAL")
        sql.execute("PRAGMA synchronous = FULL")
        for pragma in SQLITE_FLUSH_PRAGMAS:
            sql.execute(pragma)
        sql.execute("PRAGMA foreign_keys = ON")
        # What was deleted (an interaction, an update that was sent) is overwritten, not only freed.
        sql.execute("PRAGMA secure_delete = ON")
        if version == 0:
            with self.transaction():
                for statement in _SCHEMA.split(";"):
                    if statement.strip():
                        sql.execute(statement)
                sql.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                sql.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _require_version(self, sql: sqlite3.Connection, version: int) -> None:
        (application,) = sql.execute("PRAGMA application_id").fetchone()
        if application != _APPLICATION_ID:
            raise HomeBroken(
                f"{self._path} was made by a development version of tessera-edge (before 0.1.0): "
                "enrol this device again, with another home"
            )
        if version != SCHEMA_VERSION:
            raise HomeBroken(
                f"{self._path} has format {version}, this version of tessera-edge reads "
                f"{SCHEMA_VERSION}: install the newer one that made it"
            )

    @contextmanager
    def transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """All or nothing; transactions inside one join it. With ``BEGIN`` for queries alone: they
        see one and the same state, whatever other processes commit."""
        with self as sql:
            if self._depth == 0:
                sql.execute(begin)
            self._depth += 1
            try:
                yield sql
                if self._depth == 1:
                    sql.execute("COMMIT")
            except BaseException:
                # After a full disk SQLite has rolled back by itself.
                if self._depth == 1 and sql.in_transaction:
                    sql.execute("ROLLBACK")
                raise
            finally:
                self._depth -= 1

    @property
    def changes(self) -> int:
        """How many rows were written since this was opened: the same number, the same content."""
        with self as sql:
            return sql.total_changes

    def erase_deleted(self) -> None:
        """Leave nothing of what was deleted in the file's journal; nobody else may be reading."""
        self.row("PRAGMA wal_checkpoint(TRUNCATE)")


class HomeStore:
    """Some of the file's tables. Every method is one transaction, or joins the caller's."""

    def __init__(self, database: HomeDatabase) -> None:
        self._database = database
