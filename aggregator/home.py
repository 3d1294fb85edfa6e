"""The aggregator's folder: where its keys, its database and its task file lie; its store moved."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from aggregator.errors import AggregatorError
from aggregator.store import Database, Store, create_database, open_database
from aggregator.store.schema import TABLES, Shape
from device_sdk.system.files import erase_file, read_small, write_atomically
from device_sdk.system.lock import FileLock

_ROWS_AT_ONCE = 16
_MOST_IDENTITY_BYTES = 64 << 10


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


class AggregatorHome:
    """The layout. ``root.key`` may be moved away: only ``rotate`` needs it.

    ``store_url``: of the PostgreSQL database that has the fleet's store; None: a file has it, here.
    What the task file names meanwhile is the way to the same store.
    """

    def __init__(self, folder: Path, store_url: str | None = None) -> None:
        self.folder = folder
        self.store_url = store_url
        self.keys = folder / "keys"
        """Folder of the key files, mode 0700."""
        self.root_key = self.keys / "root.key"
        self.next_root_key = self.keys / "next-root.key"
        """The root key to be, until ``rotate root`` has put it in the place of the old one."""
        self.database = folder / "aggregator.sqlite"
        self.store_identity = folder / "store.id"
        """Says which store is this home's, where a URL names it, and in its second line where."""
        self._moved = folder / "aggregator.sqlite.moved"  # while file and store.id are both there
        self._copied = folder / "aggregator.sqlite.new"  # until it is whole
        self.task_file = folder / "task.toml"
        self.live_file = folder / "serving.json"
        """What ``serve`` says of its broker and its store, while it runs here."""
        self.audit_file = folder / "audit.jsonl"
        """Who did what, when; see ``aggregator.operate.audit``."""
        self.console_file = folder / "console.json"
        """Who may see and do what in the console; see ``aggregator.console.users``."""
        self.held = False
        """Whether this process holds it: see :func:`serve_lock`."""

    @classmethod
    def found(cls, folder: Path) -> AggregatorHome:
        """The home of a folder, with its store where it is."""
        home = cls(folder)
        return cls(folder, home.named_store()) if home.store_identity.exists() else home

    @property
    def is_made(self) -> bool:
        """Whether ``init`` has made it."""
        return self.database.exists() or self.store_identity.exists()

    @property
    def task_files(self) -> Path:
        """Folder of the further tasks' files, ``NAME.toml`` each."""
        return self.folder / "tasks"

    def delegate_key(self, first_serial: int) -> Path:
        """The key that signs the descriptors of a delegation, named by its first serial."""
        return self.keys / f"delegate-{first_serial}.key"

    def signing_key(self, serial: int) -> Path:
        """The online signing key of a descriptor."""
        return self.keys / f"signing-{serial}.key"

    def sessions_key(self, serial: int) -> Path:
        """The key of a descriptor that signs what is said about sessions."""
        return self.keys / f"sessions-{serial}.key"

    def hpke_key(self, serial: int) -> Path:
        """The HPKE key of a descriptor."""
        return self.keys / f"hpke-{serial}.key"

    def make(self) -> None:
        """Make the folders. Raises AggregatorError when they cannot be made or are in use."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.keys.mkdir(mode=0o700, exist_ok=True)
            taken = sorted(os.listdir(self.keys))
        except OSError as error:
            raise AggregatorError(f"{self.folder} cannot be made: {error}") from None
        if taken or self.is_made:
            raise AggregatorError(
                f"{self.folder} holds an aggregator already; choose another --home, or keep this"
            )

    def create_store(self) -> Store:
        """A store for a home that was just made. Raises AggregatorError."""
        if self.store_url is None:
            return Store(create_database(self.database))
        database = create_database(self.store_url)
        self._identify(database)
        return Store(database)

    def open_store(self, *, read_only: bool = False) -> Store:
        """The store. Raises AggregatorError when there is none, when it is another fleet's or of
        another version. ``read_only``: nothing of it or of the home is changed."""
        if not read_only:
            self._tidy()
        identified = self.store_identity.exists()
        if self.store_url is None:
            if identified:
                where = self._identity_said.splitlines()[1:]
                raise AggregatorError(
                    f"{self.folder} has its store in {where[0] if where else 'PostgreSQL'}, and no "
                    "file of its own any more: name it as store under [cluster] in its task file"
                )
            return Store(open_database(self.database, read_only=read_only))
        if not identified:
            raise AggregatorError(
                f"{self.folder} has no store in PostgreSQL; make the home anew with one, or leave "
                "the store's URL out"
            )
        identity = self._identity_said.partition("\n")[0].strip()
        if not identity:
            raise AggregatorError(
                f"{self.store_identity} is empty, and has to say which store is this home's: put a "
                "copy back, or write into it what SELECT identity FROM tessera_store says in the "
                "fleet's own database"
            )
        url = self.store_url
        return Store(
            open_database(lambda: self.named_store() or url, identity=identity, read_only=read_only)
        )

    def named_store(self, key: str = "store") -> str | None:
        """The URL that the task file gives as ``store``, or ``worker_store``, under ``[cluster]``;
        None for none, or for a file that cannot be read, of which whoever needs it says what is
        wrong."""
        try:
            table = tomllib.loads(self.task_file.read_text(encoding="utf-8-sig")).get("cluster", {})
        except (OSError, ValueError, RecursionError):
            return None
        url = table.get(key) if isinstance(table, dict) else None
        return url if isinstance(url, str) else None

    @property
    def _identity_said(self) -> str:
        """What stands in ``store.id``: of no store, where that is no text."""
        return read_small(self.store_identity, _MOST_IDENTITY_BYTES).decode(errors="replace")

    def _identify(self, database: Database) -> None:
        said = f"{database.identity}\n{database.where}\n"
        write_atomically(self.store_identity, said.encode())

    def move_store(self) -> None:
        """Copy what the file has to the empty database that ``store_url`` names; the home's store
        is there from then on, and the file is erased: it has keys, and what devices sent.

        Raises AggregatorError, and then the file is the store as before. Not while ``serve`` runs,
        nor any command.
        """
        assert self.store_url is not None
        with serve_lock(self):
            if self.store_identity.exists():
                raise AggregatorError(f"{self.folder} has its store in PostgreSQL already")
            self._finish_move()
            with (
                closing(open_database(self.database)) as source,
                _alone_with(source) as copied,
                closing(create_database(self.store_url, copied)) as target,
            ):
                self._moved.touch(0o600)
                self._identify(target)
            self._finish_move()

    def _finish_move(self) -> None:
        """Erase what was copied, and the copies that came to nothing: they hold keys, and what
        devices sent. Once the home says that its store is elsewhere, that is the file."""
        _erase(self._copied)
        if self._moved.exists():
            if self.store_identity.exists():
                _erase(self.database)
            self._moved.unlink()

    def _tidy(self) -> None:
        """Finish a move that was cut short, unless one is going on."""
        if not (self._moved.exists() or self._copied.exists()):
            return
        if self.held:
            self._finish_move()
            return
        with suppress(AggregatorError), serve_lock(self):
            self._finish_move()

    def move_store_back(self) -> None:
        """The other way: into the home's file. What was in the database is deleted there, and it is
        no home's store any more. Raises AggregatorError, and then it is the store as before."""
        if not self.store_identity.exists():
            raise AggregatorError(f"{self.folder} has its store in {self.database} already")
        with serve_lock(self):
            source = self.open_store().database
            with closing(source):
                try:
                    with _alone_with(source) as copied:
                        create_database(self._copied, copied).close()
                    self._moved.touch(0o600)
                    self._copied.rename(self.database)
                finally:
                    _erase(self._copied)
                self.store_identity.unlink()
                self._finish_move()
                with source.transaction():
                    # A copy of the home elsewhere must not go on with it.
                    source.execute("UPDATE tessera_store SET identity = 'moved'")
                    source.execute(f"TRUNCATE {', '.join(TABLES)}")


def _erase(database: Path) -> None:
    """An SQLite file and all that stands beside it."""
    for suffix in ("", "-wal", "-shm", "-journal", ".lock"):
        erase_file(database.with_name(database.name + suffix))


@contextmanager
def _alone_with(source: Database) -> Iterator[Callable[[Database], None]]:
    """A transaction of who copies a store that nobody is to write to any more, whatever happens
    to the copy; what copies it. Raises AggregatorError while a cluster serves."""
    store = Store(source)
    store.end_cluster()
    with source.transaction():
        store.lease.require_free()
        yield partial(copy_store, source)


# One server a home: two would both absorb, and each would undo the other's rounds.
#
# What replaces the open round from outside (``restored``) holds the home in the same way.


_LOOK_SECONDS = 0.2
"""A command that looks whether ``serve`` runs holds the lock for less."""


def is_served(home: AggregatorHome) -> bool:
    """Whether ``serve`` runs in a home, or another that holds it."""
    lock = FileLock(home.folder / "serve.lock")
    try:
        return lock.is_taken()
    finally:
        lock.close()


@contextmanager
def serve_lock(home: AggregatorHome) -> Iterator[None]:
    """Hold the home. The system lets go of the lock when the process ends, however it does.

    Raises AggregatorError when another process holds it.
    """
    if not home.folder.is_dir():
        raise AggregatorError(
            f"{home.folder} does not exist; run tessera-aggregator init --home {home.folder} first"
        )
    lock = FileLock(home.folder / "serve.lock")
    try:
        until_seconds = time.monotonic() + _LOOK_SECONDS
        while not lock.try_acquire():
            if time.monotonic() >= until_seconds:
                raise AggregatorError(f"a serve is running on {home.folder}: stop it first")
            time.sleep(_LOOK_SECONDS / 10)
        home.held = True
        yield
    finally:
        home.held = False
        lock.close()
