"""The store as a PostgreSQL database: for processes on several machines, see docs/store.md."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from itertools import count
from typing import Any, TypeVar

from aggregator.errors import (
    AggregatorError,
    OutcomeUnknown,
    StoreAway,
    StoreError,
    StoreOutdated,
    StoreUnreached,
)
from aggregator.events import LogEvent
from aggregator.store.database import (
    ALONE_WITHIN_SHARED,
    HELD_OUTSIDE,
    STORE_FAILURES,
    Database,
)
from aggregator.store.roles import OWNER, Rights
from aggregator.store.schema import SCHEMA, SCHEMA_VERSION, TABLES, added_columns, require_version
from device_sdk.system.lock import Owner

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.types.numeric import FloatBinaryDumper, Int8BinaryDumper
    from psycopg.types.string import StrBinaryDumper
except ImportError as error:
    raise AggregatorError(
        f"a store in PostgreSQL needs psycopg ({error}): pip install 'tessera-edge[cluster]'"
    ) from None

Answer = TypeVar("Answer")

OLDEST_SERVER = 15
"""PostgreSQL's major version from which on it will do."""

_OWN_TABLES = """
CREATE TABLE tessera_store (version BIGINT NOT NULL, identity TEXT COLLATE "C" NOT NULL);
CREATE TABLE tessera_commits (
    writer TEXT COLLATE "C" PRIMARY KEY,
    number BIGINT NOT NULL,
    at TIMESTAMPTZ NOT NULL,
    owner TEXT NOT NULL DEFAULT current_user
)
"""
# Text is compared by its bytes, as SQLite does, whatever language the database was made for.
_TYPES = {
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    "BLOB": "BYTEA",
    "ANY": "BYTEA",
    "TEXT": 'TEXT COLLATE "C"',
}
_WRITERS_LOCK = 0x54455353  # "TESS"
_CHANNEL = "tessera_changes"
_PATIENCE_SECONDS = 30.0
_LONGEST_WAIT_SECONDS = 1.0
_SILENT_SECONDS = 5.0
_MOST_SILENT_SECONDS = 300.0
_FORGOTTEN_AFTER = "90 days"
# Of libpq, where the URL does not say: a peer that is gone is noticed within seconds, a server that
# only reads is none of ours.
_DEFAULTS = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "target_session_attrs": "read-write",
}
_LOCAL = ("", "localhost", "127.0.0.1", "::1")
# By the server, where neither role, database nor URL says: who holds others up is cut off.
_IDLE_TIMEOUT, _LOCK_TIMEOUT = "idle_in_transaction_session_timeout", "lock_timeout"
_LOCK_SECONDS = 10.0
_SETTINGS = ("fsync", "synchronous_commit", "server_encoding", _IDLE_TIMEOUT, _LOCK_TIMEOUT)
_MEANT_FOR_US = ("user", "database", "database user", "client")


class _WatchedConnection(psycopg.Connection[tuple[Any, ...]]):
    """One whose server may fall silent within a statement: its machine stands still, or its disk,
    while the kernel's connection lives. No time-out ends that, and it may go on at any moment."""

    waits: Callable[[float], bool] = staticmethod(lambda seconds: True)
    """Asked a few times a second, with how long the server has been silent: whether to wait on."""
    server: Mapping[str, str]
    """The server's settings, of those that matter here."""

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """As psycopg's, through which all waiting goes. Raises OperationalError, with the
        connection closed, where :attr:`waits` says so."""
        return super().wait(self._watched(gen), *args, **kwargs)

    def _watched(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        heard_seconds = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready:
                    heard_seconds = time.monotonic()
                elif not self.waits(time.monotonic() - heard_seconds):
                    self.close()
                    raise psycopg.OperationalError("it does not answer, and is waited for no more")
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


class PostgresDatabase(Database):
    """One connection to a database of the fleet's own, which comes back when it was lost.

    **Writers.** A transaction takes an advisory lock, shared or alone, before all else, and holds
    it until it is over. So one that is alone is what SQLite's would be, the only writer, and may
    read and write without a thought of others; shared ones run beside each other. Each statement
    sees what was committed before it (``READ COMMITTED``): behind that lock nothing weaker is seen.

    **A lost connection.** Reading, and beginning a transaction, waits and tries again for half a
    minute, or for as long as :attr:`~Database.waits` says; a statement within a transaction fails,
    and all of the transaction with it. A commit without an answer is looked up: each transaction
    leaves its number in its writer's row of ``tessera_commits``, and that row can be held once the
    lost transaction is over. A server that is silent within a statement is waited for too, and
    after five seconds :attr:`~Database.waits` is told.

    **Silence.** Within a transaction a session may send nothing for five seconds, then the server,
    or who waits for it, ends it. One that lost a transaction which took as long or longer may be
    silent for twice as long from then on, up to five minutes, and says so in its application's
    name: what is only slow (a large value on a slow line, a sum over many) gets through.

    **Changes.** Transactions that were alone notify the others; the socket tells
    :meth:`changed_elsewhere`.

    **Another server** that the URL may lead to after that has to be the same store, and to have
    this process's last commit: another store, or an older copy of this one, is refused with each
    try, until the right one is back.

    ``url``: or what gives it, asked at each connection, so that another password or place needs no
    restart; as libpq reads its password file. ``fill``: make the store in an empty database, with
    what this writes into it, or not at all. ``identity``: which store it has to be; without one any
    will do. ``rights``: what the URL's role needs. ``read_only``: nothing is written. No error and
    no ``repr`` shows the URL's password.
    """

    tells_time = True

    def __init__(
        self,
        url: str | Callable[[], str],
        fill: Callable[[Database], None] | None = None,
        *,
        identity: str = "",
        rights: Mapping[str, Rights] = OWNER,
        read_only: bool = False,
    ) -> None:
        self._url, self._read_only = url, read_only
        self._read_settings()
        self._has_told = False
        self._may_be_silent_seconds = _SILENT_SECONDS
        self._silent_since: dict[tuple[Any, ...], float] = {}
        self._owner = Owner(f"the connection to {self.where}")
        self._depth = 0
        self._shared = self._wrote = self._changed = False
        self._number = self._committed = 0
        try:
            self._session = self._connect()
        except psycopg.Error as error:
            raise StoreUnreached(f"{self.where} {_not_connected(error)}") from None
        try:
            self._require_server()
            if fill is not None:
                self._create(fill)
            self.identity = self._require_store(identity, rights)
            self._writer = "" if read_only else self._become_writer()
        except psycopg.errors.InsufficientPrivilege as error:
            self.close()
            raise AggregatorError(
                f"{self.where} cannot be used: {_told(error)}. The role that the URL names has to "
                "own the database, or its tables and the right to make some; that of workers, what "
                "tessera-aggregator store --worker-role gives it"
            ) from None
        except psycopg.Error as error:
            self.close()
            kind = StoreUnreached if self._is_away(error) else AggregatorError
            raise kind(f"{self.where} cannot be used: {_told(error)}") from None
        except (AggregatorError, *STORE_FAILURES):
            self.close()
            raise

    # -- connecting --------------------------------------------------------------------------------

    @property
    def _connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Raises ForkedError in a fork, which has the same socket: the session is the parent's."""
        self._owner.require()
        return self._session

    def _read_settings(self) -> None:
        """Raises AggregatorError for a URL that cannot be read."""
        self._settings = settings_of(self._url if isinstance(self._url, str) else self._url())
        self.where = _where(self._settings)

    def _is_silent(self, seconds: float) -> bool:
        """See ``_WatchedConnection.waits``."""
        if seconds < _SILENT_SECONDS:
            self._has_told = False
            return True
        problem = (
            f"{self.where} is reached and does not answer: its machine or its disk may stand still"
        )
        if self.waits is not None:
            return self.waits(problem)
        if not self._has_told:
            LogEvent.STORE_SILENT.log(problem=problem)
        self._has_told = True
        return True

    def _connect(self) -> _WatchedConnection:
        connection = _WatchedConnection.connect(
            **self._settings,
            autocommit=True,
            cursor_factory=psycopg.RawCursor[tuple[Any, ...]],
            client_encoding="UTF8",
        )
        for kind, dumper in ((int, _Int), (bool, _Int), (float, FloatBinaryDumper), (str, _Text)):
            connection.adapters.register_dumper(kind, dumper)
        connection.waits = self._is_silent
        connection.add_notify_handler(
            lambda notify: self._notified(notify.pid != connection.info.backend_pid)
        )
        try:
            found = connection.execute(
                "SELECT name, setting, source FROM pg_settings WHERE name = ANY($1)",
                (list(_SETTINGS),),
            ).fetchall()
            connection.server = {name: setting for name, setting, _ in found}
            meant = {name for name, _, source in found if source in _MEANT_FOR_US}
            script = [f"LISTEN {_CHANNEL}", "SET jit = off"]
            # Durable when it ends, whatever others of this server's users do without.
            if connection.server["synchronous_commit"] == "off":
                script.append("SET synchronous_commit = on")
            if self._read_only:
                script.append("SET default_transaction_read_only = on")
            if _LOCK_TIMEOUT not in meant:
                script.append(f"SET {_LOCK_TIMEOUT} = '{_LOCK_SECONDS}s'")
            silent_seconds = int(connection.server[_IDLE_TIMEOUT]) / 1000
            if _IDLE_TIMEOUT not in meant:
                silent_seconds = self._may_be_silent_seconds
                script.append(f"SET {_IDLE_TIMEOUT} = '{silent_seconds}s'")
            script.append(
                f"SET application_name = 'tessera store {SCHEMA_VERSION}, may be silent for "
                f"{silent_seconds} s'"
            )
            connection.execute("; ".join(script), prepare=False)
        except BaseException:
            connection.close()
            raise
        return connection

    def _require_server(self) -> None:
        version = self._connection.info.server_version
        if version < OLDEST_SERVER * 10_000:
            raise AggregatorError(
                f"{self.where} is version {version // 10_000}; PostgreSQL {OLDEST_SERVER} or newer "
                "is needed"
            )
        if self._session.server["fsync"] != "on":
            raise AggregatorError(
                f"{self.where} runs with fsync = off: what it commits may be lost with its "
                "machine's power. Set fsync = on there"
            )
        if self._session.server["server_encoding"] != "UTF8":
            raise AggregatorError(
                f"{self.where} holds text as {self._session.server['server_encoding']}: make the "
                "database with ENCODING 'UTF8'"
            )

    def _create(self, fill: Callable[[Database], None]) -> None:
        with self._connection.transaction():
            self._alone()
            if self._tables():
                raise AggregatorError(
                    f"{self.where} is not empty: each fleet has a database of its own, made with "
                    "CREATE DATABASE. Where a move into it did not come to its end, drop it first"
                )
            for statement in SCHEMA:
                self._connection.execute(_definition(statement))
            for table, shape in TABLES.items():
                # What is sealed or learnt does not get smaller, and trying costs time.
                wide = [name for name, kind in shape.columns.items() if kind == "BLOB"]
                for column in wide:
                    self._connection.execute(
                        f"ALTER TABLE {table} ALTER {column} SET STORAGE EXTERNAL"
                    )
            self._connection.execute(_OWN_TABLES, prepare=False)
            self._connection.execute(
                "INSERT INTO tessera_store VALUES ($1, gen_random_uuid())", (SCHEMA_VERSION,)
            )
            self._depth = 1
            try:
                fill(self)
            finally:
                self._depth = 0

    def _require_store(self, identity: str, rights: Mapping[str, Rights]) -> str:
        tables = self._tables()
        if "tessera_store" not in tables:
            holds = "holds what is no aggregator's" if tables else "is empty"
            raise AggregatorError(
                f"{self.where} {holds}; "
                + (
                    "this home's store is in another database: name that one in the store's URL"
                    if identity
                    else "tessera-aggregator store --move brings a home's store into an empty one"
                )
            )
        version, found = self._version_and_identity()
        if identity not in ("", found):
            raise AggregatorError(
                f"{self.where} holds another fleet's store: name this one's in the store's URL"
            )
        require_version(self.where, version)
        self._require_rights(rights)
        if rights is OWNER:
            self._add_columns()
        return found

    def _tables(self) -> set[str]:
        found = self._connection.execute(
            "SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema()"
        )
        return {row[0] for row in found}

    def _add_columns(self) -> None:
        found: dict[str, list[str]] = {table: [] for table in TABLES}
        for table, column in self._connection.execute(
            "SELECT table_name::text, column_name::text FROM information_schema.columns "
            "WHERE table_schema = current_schema()"
        ):
            found.setdefault(table, []).append(column)
        for table in TABLES:
            for statement in added_columns(table, found[table]):
                if self._read_only:
                    raise StoreOutdated(self.where)
                added = statement.replace("ADD COLUMN", "ADD COLUMN IF NOT EXISTS")
                self._connection.execute(_definition(added))

    def _version_and_identity(self) -> tuple[int, str]:
        row = self._connection.execute("SELECT version, identity FROM tessera_store").fetchone()
        assert row is not None
        return int(row[0]), str(row[1])

    def _require_rights(self, rights: Mapping[str, Rights]) -> None:
        needed = [(name, kind) for name, each in rights.items() for kind in each.columns]
        found = self._connection.execute(
            "SELECT DISTINCT name FROM unnest($1::text[], $2::text[]) AS needed (name, kind) "
            "WHERE to_regclass(name) IS NULL OR NOT CASE kind "
            "WHEN 'DELETE' THEN has_table_privilege(to_regclass(name), kind) "
            "ELSE has_any_column_privilege(to_regclass(name), kind) END",
            ([name for name, _ in needed], [kind for _, kind in needed]),
        )
        if missing := sorted(row[0] for row in found):
            raise AggregatorError(
                f"{self.where} cannot be used: its tables {', '.join(missing)} are missing, or the "
                "role that the URL names may not read and write them. A worker's role gets its "
                "rights by tessera-aggregator store --worker-role"
            )

    def _become_writer(self) -> str:
        self._connection.execute(
            f"DELETE FROM tessera_commits WHERE at < now() - interval '{_FORGOTTEN_AFTER}'"
        )
        row = self._connection.execute(
            "INSERT INTO tessera_commits VALUES (gen_random_uuid(), 0, now()) RETURNING writer"
        ).fetchone()
        assert row is not None
        return str(row[0])

    def _reconnect(self) -> None:
        """Raises StoreError for a server that has another store, or what this one was before, or
        does not let us in."""
        try:
            self._read_settings()
            connection = self._connect()
        except AggregatorError as error:
            raise StoreAway(str(error)) from None
        except psycopg.OperationalError as error:
            if not _is_let_down(error):
                raise
            raise StoreAway(f"{self.where} {_not_connected(error)}") from None
        try:
            row = connection.execute(
                "SELECT identity, (SELECT number FROM tessera_commits WHERE writer = $1) "
                "FROM tessera_store",
                (self._writer,),
            ).fetchone()
            identity, number = row or ("", None)
            if identity != self.identity:
                raise StoreAway(
                    f"{self.where} holds another store than this process began with: have the "
                    "store's URL lead to the right server"
                )
            if number is None or number < self._committed:
                raise StoreAway(
                    f"{self.where} is an older copy of the store, which lacks what was committed: "
                    "have the store's URL lead to the newer one. If that is lost, stop all "
                    "processes and run tessera-aggregator restored"
                )
        except psycopg.errors.UndefinedTable:
            connection.close()
            raise StoreAway(f"{self.where} holds no aggregator's store any more") from None
        except BaseException:
            connection.close()
            raise
        self._session = connection
        self._changed = True  # what was notified meanwhile, nobody heard

    def _alone(self) -> None:
        self._connection.execute("SELECT pg_advisory_xact_lock($1)", (_WRITERS_LOCK,))

    # -- transactions ------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, shared: bool) -> Iterator[None]:
        if self._depth:
            if self._shared and not shared:
                raise RuntimeError(ALONE_WITHIN_SHARED)
            with self._savepoint():
                yield
            return
        self._begin(shared)
        began_seconds = time.monotonic()
        self._depth, self._shared, self._wrote = 1, shared, False
        try:
            try:
                self.guard()
                yield
            except BaseException:
                self._give_up()
                raise
            self._commit()
        except StoreAway:
            if time.monotonic() - began_seconds >= self._may_be_silent_seconds:
                twice = 2 * self._may_be_silent_seconds
                self._may_be_silent_seconds = min(twice, _MOST_SILENT_SECONDS)
            raise
        finally:
            self._depth = 0

    def _begin(self, shared: bool) -> None:
        self._number += 1
        kind = "_shared" if shared else ""
        script = (
            "BEGIN ISOLATION LEVEL READ COMMITTED; "
            f"SELECT pg_advisory_xact_lock{kind}({_WRITERS_LOCK}); "
            f"INSERT INTO tessera_commits VALUES ('{self._writer}', {self._number}, now()) "
            "ON CONFLICT (writer) DO UPDATE SET number = excluded.number, at = excluded.at; "
            "SELECT version FROM tessera_store"
        )
        try:
            row = self._patiently(lambda: self._run(script).fetchone())
        except BaseException:
            self._give_up()
            raise
        if row != (SCHEMA_VERSION,):
            self._give_up()
            raise StoreError(
                f"{self.where} was taken over by another version of this program meanwhile: "
                "start this process with that version"
            )

    def _commit(self) -> None:
        tell = self._wrote and not self._shared
        try:
            status = self._run(f"NOTIFY {_CHANNEL}; COMMIT" if tell else "COMMIT").statusmessage
        except psycopg.Error as error:
            if self._lost(error):
                self._look_up(error)
                return
            self._give_up()
            raise self._failure(error) from None
        except BaseException:
            self._connection.close()  # nobody waits for what became of it
            raise
        if status != "COMMIT":
            raise StoreError(f"{self.where}: a statement had failed, so nothing was committed")
        self._committed = self._number

    def _look_up(self, lost: psycopg.Error) -> None:
        """What became of a commit that was not answered. Returns where it is kept."""
        query = "SELECT number FROM tessera_commits WHERE writer = $1 FOR UPDATE"
        try:
            # Waits while the server still has the lost connection's transaction.
            row = self._patiently(
                lambda: self._connection.execute(query, (self._writer,)).fetchone()
            )
        except StoreError as error:
            raise OutcomeUnknown(
                f"{self.where} was lost in the midst of a commit ({_told(lost)}), and did not "
                f"tell what became of it: {error}"
            ) from None
        if row is None:
            raise OutcomeUnknown(
                f"{self.where} was lost in the midst of a commit ({_told(lost)}), and knows "
                "nothing of this process any more"
            )
        if row[0] != self._number:
            raise self._failure(lost)
        self._committed = self._number

    def _give_up(self) -> None:
        try:
            self._run("ROLLBACK")
        except psycopg.Error:
            self._connection.close()

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        self._depth += 1
        try:
            self._within("SAVEPOINT nested")
            try:
                yield
                self._within("RELEASE nested")
            except BaseException:
                with suppress(StoreError):  # the transaction is gone: what is raised says why
                    self._within("ROLLBACK TO nested; RELEASE nested")
                raise
        finally:
            self._depth -= 1

    def _within(self, script: str) -> None:
        try:
            self._run(script)
        except psycopg.Error as error:
            raise self._failure(error) from None

    # -- statements --------------------------------------------------------------------------------

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """See :class:`Database`."""
        if not self._depth:
            with self.transaction():
                return self.execute(sql, values)
        changed = self._ask(sql, values).rowcount
        self._wrote |= changed > 0
        return changed

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """See :class:`Database`. A plain ``INSERT`` is a ``COPY``, which is the least work."""
        if not self._depth:
            with self.transaction():
                self.execute_many(sql, rows)
            return
        self._wrote = True
        copy = _as_copy(sql)
        try:
            with self._connection.cursor() as cursor:
                if copy is None:
                    cursor.executemany(_numbered(sql), rows)
                    # Its last message has the server put away the clock that would end a session
                    # which falls silent in a transaction; any statement winds it up again.
                    self._run("SELECT 1")
                    return
                statement, types, first = copy
                with cursor.copy(statement) as file:
                    file.set_types(types)
                    for row in rows:
                        file.write_row((*first, *row))
        except psycopg.Error as error:
            raise self._failure(error) from None

    def rows(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """See :class:`Database`: all of them are in memory."""
        yield from self._ask(sql, values)

    def row(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """See :class:`Database`."""
        return self._ask(sql, values).fetchone()

    def hold(
        self, sql: str, values: Sequence[Any] = (), *, shared: bool = False
    ) -> tuple[Any, ...] | None:
        """See :class:`Database`."""
        if not self._depth:
            raise RuntimeError(HELD_OUTSIDE)
        return self.row(f"{sql} FOR {'SHARE' if shared else 'UPDATE'}", values)

    def now(self) -> float:
        """See :class:`Database`."""
        row = self.row("SELECT extract(epoch FROM clock_timestamp())::float8")
        assert row is not None
        return float(row[0])

    def to_any(self, value: int | float | str | bytes) -> bytes:
        """A tag, and the value as text or bytes: a column has one type here."""
        if isinstance(value, bytes):
            return b"b" + value
        if isinstance(value, str):
            return b"t" + value.encode()
        if isinstance(value, float):
            return b"r" + repr(float(value)).encode()
        return b"i" + str(int(value)).encode()  # a truth value too, as in SQLite

    def from_any(self, stored: Any) -> Any:
        """See :class:`Database`."""
        tag, rest = stored[:1], stored[1:]
        if tag == b"b":
            return rest
        return {b"t": str, b"r": float, b"i": int}[tag](rest.decode())

    def changed_elsewhere(self) -> bool:
        """See :class:`Database`."""
        pgconn = self._connection.pgconn
        try:
            pgconn.consume_input()
            while notify := pgconn.notifies():
                self._notified(notify.be_pid != self._connection.info.backend_pid)
        except psycopg.Error:
            self._connection.close()
        if self._connection.closed:
            return True  # who knows; whoever looks waits for the connection to come back
        changed, self._changed = self._changed, False
        return changed

    def erase_deleted(self) -> bool:
        """The server makes room of what was deleted by itself, and writes over it in its own time:
        see docs/store.md."""
        return True

    def close(self) -> None:
        """See :class:`Database`. In a fork it is left alone."""
        if self._owner.is_here:
            self._session.close()

    def _ask(self, sql: str, values: Sequence[Any]) -> psycopg.Cursor[tuple[Any, ...]]:
        def ask() -> psycopg.Cursor[tuple[Any, ...]]:
            return self._connection.execute(_numbered(sql), values, binary=True)

        if not self._depth:
            return self._patiently(ask)
        try:
            return ask()
        except psycopg.Error as error:
            raise self._failure(error) from None

    def _run(self, script: str) -> psycopg.Cursor[tuple[Any, ...]]:
        """Statements without values in one message; the last one's answer."""
        cursor = self._connection.execute(script, prepare=False)
        while cursor.nextset():
            pass
        return cursor

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        """What is asked outside of a transaction, again where the connection was lost."""
        until_seconds = time.monotonic() + _PATIENCE_SECONDS
        wait_seconds = 0.02
        while True:
            try:
                if self._connection.closed:
                    self._reconnect()
                return ask()
            except psycopg.Error as error:
                failure = self._failure(error)
                is_cut = error.sqlstate == _LOCK_NOT_AVAILABLE and self._cut_off_who_is_silent()
                is_away = self.waits is not None and self._is_away(error)
                if not (is_cut or self._lost(error) or is_away):
                    raise failure from None
                if self.waits is None and time.monotonic() >= until_seconds:
                    raise failure from None
                self._connection.close()  # what it had begun, if anything, is given up
            except StoreAway as error:
                if self.waits is None:
                    raise
                failure = error
            if self.waits is not None and not self.waits(str(failure)):
                raise failure
            time.sleep(wait_seconds)
            wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)

    def _cut_off_who_is_silent(self) -> bool:
        """Whether sessions were ended that kept us waiting: they hold the writers' lock in the
        midst of a statement (a ``COPY``, a pipeline) and have sent nothing for as long as they said
        that they may be silent. The server looks for itself only at those that are idle: a process
        that is frozen there would hold everybody up for good.

        Those that have to be left alone for longer than a moment are looked at again after the next
        wait for the lock."""
        away = (psycopg.OperationalError, psycopg.errors.InsufficientPrivilege)
        with suppress(*away), closing(self._connect()) as connection:
            left_seconds = self._look_who_is_silent(connection)
            if 0 < min(left_seconds.values(), default=math.inf) <= _SILENT_SECONDS:
                time.sleep(min(left_seconds.values()))
                left_seconds = self._look_who_is_silent(connection)
            silent = [pid for pid, left in left_seconds.items() if left <= 0]
            return connection.execute(_END, (silent,)).fetchone() == (True,)
        return False

    def _look_who_is_silent(self, connection: psycopg.Connection[Any]) -> dict[int, float]:
        """How long each session that keeps us waiting may still be so, by its process."""
        now = time.monotonic()
        found = {tuple(seen): seconds for *seen, seconds in connection.execute(_SILENT)}
        self._silent_since = {seen: self._silent_since.get(seen, now) for seen in found}
        return {
            seen[0]: self._silent_since[seen] + (seconds or _SILENT_SECONDS) - now
            for seen, seconds in found.items()
        }

    def _lost(self, error: psycopg.Error) -> bool:
        """Whether the connection is gone. What a server says as it ends a session may come before
        the end itself."""
        if error.sqlstate in _ENDINGS:
            self._connection.close()
        return self._connection.closed

    def _is_away(self, error: psycopg.Error) -> bool:
        """Whether it is the server's state, and no fault of the statement's."""
        state = error.sqlstate or ""
        lost = self._session.closed or isinstance(error, psycopg.InterfaceError)
        return lost or not state or state in _ENDINGS or state.startswith(_PASSING)

    def _failure(self, error: psycopg.Error) -> StoreError:
        kind = StoreAway if self._is_away(error) else StoreError
        if error.sqlstate == _LOCK_NOT_AVAILABLE:
            return kind(f"{self.where}: another process has been writing to it for long")
        return kind(f"{self.where}: {_told(error)}")

    def _notified(self, elsewhere: bool) -> None:
        self._changed |= elsewhere


# Who holds the writers' lock of this database and is waited for to send more, how far each came,
# and for how long it said that it may be silent.
_SILENT = f"""
SELECT pid, backend_start, query_start, state_change, bytes_processed,
    substring(application_name FROM '^tessera store .* ([0-9.]+) s$')::float8
FROM pg_locks JOIN pg_stat_activity USING (pid) LEFT JOIN pg_stat_progress_copy USING (pid)
WHERE locktype = 'advisory' AND (classid, objid, objsubid) = (0, {_WRITERS_LOCK}, 1) AND granted
AND database = (SELECT oid FROM pg_database WHERE pg_database.datname = current_database())
AND wait_event = 'ClientRead'
"""
_END = "SELECT bool_or(pg_terminate_backend(pid)) FROM unnest($1::int[]) AS pid"
_ENDINGS = ("57P01", "57P02", "57P03", "57P05", "25P03")
_LOCK_NOT_AVAILABLE = "55P03"
# Of statements that nothing is wrong with: no connection, rolled back for another, no room or no
# memory, waits for somebody, ended by whoever runs the server, its disk; and a server that only
# reads, as a standby does.
_PASSING = ("08", "40", "53", "55", "57", "58", "25006", "25P03")


class _Int(Int8BinaryDumper):
    """Of all integers and truth values, however small: a statement has one type for each place."""


class _Text(StrBinaryDumper):
    """A text holds no NUL here, and devices may send one: it must not keep others' from being
    stored."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\N{REPLACEMENT CHARACTER}"))


def settings_of(url: str) -> dict[str, Any]:
    """What a URL says, and what holds where it does not. Raises AggregatorError."""
    unreadable = AggregatorError(
        "the store's URL cannot be read; expected postgresql://USER@HOST:PORT/DATABASE, with %XX "
        "for what is neither letter nor digit in a password"
    )
    try:
        given = conninfo_to_dict(url)
    except psycopg.Error:
        raise unreadable from None  # what libpq says of it may hold a part of the password
    # So may these, where one has signs that mean something in a URL.
    parts = [str(given.get(name, "")) for name in ("host", "port", "dbname")]
    if any("@" in part[1:] for part in parts) or not re.fullmatch(r"[\d,]*", parts[1]):
        raise unreadable
    settings = {**_DEFAULTS, **given}
    hosts = str(given.get("host", "")).split(",")
    if "sslmode" not in given and not all(host in _LOCAL or host[0] in "/@" for host in hosts):
        settings["sslmode"] = "verify-full"
    return settings


def _where(settings: dict[str, Any]) -> str:
    host = settings.get("host") or settings.get("hostaddr") or "this machine"
    port = f":{settings['port']}" if "port" in settings else ""
    name = f", database {settings['dbname']}" if "dbname" in settings else ""
    return f"PostgreSQL at {host}{port}{name}"


def _told(error: psycopg.Error) -> str:
    """In one line, and without the values that a server's details show."""
    told = error.diag.message_primary or str(error)
    return " ".join(told.split())


def _is_let_down(error: psycopg.Error) -> bool:
    """Whether a server was reached that asked for a password."""
    connection = error.pgconn
    return connection is not None and bool(connection.needs_password or connection.used_password)


def _not_connected(error: psycopg.Error) -> str:
    """Why, and what to do."""
    asked = _is_let_down(error)
    told = re.sub(r"\s*Is the server running [^?]*\?", "", _told(error))
    if asked:
        return (
            f"does not let us in: {told}. The password of the URL's role stands in ~/.pgpass (mode "
            "0600), in the file that PGPASSFILE names, or in PGPASSWORD"
        )
    return f"cannot be reached: {told}. Is it running, and does the store's URL name it right?"


def _definition(statement: str) -> str:
    """A statement of the schema, or of a step, in PostgreSQL's words."""
    statement = re.sub(r"--.*", "", statement)
    if not re.match(r"\s*(CREATE|ALTER) TABLE", statement):
        return statement
    statement = re.sub(r"\)\s*STRICT(, WITHOUT ROWID)?\s*$", ")", statement)
    return re.sub(rf"\b({'|'.join(_TYPES)})\b", lambda word: _TYPES[word[0]], statement)


@lru_cache(maxsize=1024)
def _numbered(sql: str) -> str:
    """A statement's places as PostgreSQL numbers them."""
    numbers = count(1)
    return re.sub(r"\?(\d*)", lambda place: f"${place[1] or next(numbers)}", sql)


@lru_cache(maxsize=1024)
def _as_copy(sql: str) -> tuple[str, list[str], tuple[int, ...]] | None:
    """For an ``INSERT`` of given values alone: the ``COPY``, its columns' types, and what stands
    first in each row."""
    found = re.fullmatch(r"INSERT INTO (\w+) \(([\w, ]+)\) VALUES \(((?:\d+, )*)\?(?:, \?)*\)", sql)
    if found is None:
        return None
    table, columns, first = found.groups()
    kinds = TABLES[table].columns
    types = {"INTEGER": "int8", "REAL": "float8", "BLOB": "bytea", "ANY": "bytea", "TEXT": "text"}
    return (
        f"COPY {table} ({columns}) FROM STDIN (FORMAT BINARY)",
        [types[kinds[column]] for column in columns.split(", ")],
        tuple(map(int, re.findall(r"\d+", first))),
    )
