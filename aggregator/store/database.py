"""What every table leans on: one connection to a store, whichever engine keeps it."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from aggregator.errors import StoreError
from aggregator.store.schema import Row, columns_of, or_replace

STORE_FAILURES = (sqlite3.Error, StoreError, OSError)
"""What a disk or a connection does: full or gone, say. It is no fault of what was to be written."""


ALONE_WITHIN_SHARED = "a transaction that is to be alone cannot begin within a shared one"
HELD_OUTSIDE = "a row is held for the rest of a transaction, and there is none"
_AT_ONCE = 256


class Database(ABC):
    """One connection. Statements are written once for all engines, see ``schema``.

    Places for values are ``?``, or ``?1``, ``?2``, ... in all of a statement. All methods may raise
    one of ``STORE_FAILURES``.
    """

    guard: Callable[[], None] = staticmethod(lambda: None)
    """Called first in each transaction, to hold what gives this process the right to write. Where
    it raises, nothing is written."""

    waits: Callable[[str], bool] | None = None
    """Asked, with what is wrong, while the store is away, between two tries to reach it: whether to
    wait on. None: for half a minute. So a process that serves waits however long, says so, and ends
    when it is asked to. A file waits for ten seconds for whoever holds it."""

    where: str
    """Its place, for people: without a password."""

    tells_time = False
    """Whether its clock is one that several machines share, and not this machine's."""

    identity = ""
    """Which store it is, where its place alone does not say it: drawn when it was made."""

    _then: list[Callable[[], object]] | None = None  # of the transaction that runs

    @contextmanager
    def transaction(self, *, shared: bool = False) -> Iterator[None]:
        """All or nothing, durable at the end; one within another, at the other's end.

        No other transaction runs meanwhile, in any process: what was read here stays true here.
        ``shared``: others that are shared may run beside it, where the engine can do that. They
        need :meth:`hold` where they change what they have read, and write to rows that others write
        too in the order of their keys, since else they may wait for each other for ever.

        A shared one may stand within one that is not; the other way round raises RuntimeError.
        """
        with self._transaction(shared):  # a thread at a time
            outer, self._then = self._then, []
            then = self._then
            try:
                yield
            finally:
                self._then = outer
        if outer is not None:
            outer += then
            return
        for each in then:
            each()

    @abstractmethod
    def _transaction(self, shared: bool) -> AbstractContextManager[None]:
        """What an engine does for :meth:`transaction`."""

    def when_kept(self, then: Callable[[], object]) -> None:
        """Call it as soon as the transaction that runs is committed, and never where that fails;
        at once outside of one. So what is written down is forgotten in memory, and no sooner."""
        if self._then is None:
            then()
        else:
            self._then.append(then)

    @abstractmethod
    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run one statement that writes; the number of rows it changed.

        Outside of a transaction it is one by itself.
        """

    @abstractmethod
    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each of many rows, as :meth:`execute` does."""

    def insert(self, table: str, row: Mapping[str, Any], *, replace: bool = False) -> None:
        """Add a row, by column; ``replace``: in the place of one of its key."""
        places = ", ".join("?" * len(row))
        end = f" {or_replace(table)}" if replace else ""
        sql = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places}){end}"
        self.execute(sql, list(row.values()))

    def to_any(self, value: int | float | str | bytes) -> Any:
        """A value for a column of type ``ANY``."""
        return value

    def from_any(self, stored: Any) -> Any:
        """The value that such a column holds."""
        return stored

    @abstractmethod
    def rows(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query. An engine may have all of them in memory: what can be more than
        that is asked for in parts."""

    def rows_in(self, sql: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """The rows of a query that ends with a column, for these values of it."""
        for begin in range(0, len(values), _AT_ONCE):
            part = values[begin : begin + _AT_ONCE]
            # Of few lengths, so that engines see few statements.
            places = 1 << (len(part) - 1).bit_length()
            filled = [*part, *[part[-1]] * (places - len(part))]
            yield from self.rows(f"{sql} IN ({', '.join('?' * places)})", filled)

    @abstractmethod
    def row(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """The first row of a query, or None."""

    @abstractmethod
    def hold(
        self, sql: str, values: Sequence[Any] = (), *, shared: bool = False
    ) -> tuple[Any, ...] | None:
        """The first row of a query of one table, as it is now and stays until this transaction
        ends, or None.

        Nobody else changes it meanwhile or holds it; ``shared``: others may hold it so too. Waits
        for those who do. Raises RuntimeError outside of a transaction.
        """

    @abstractmethod
    def now(self) -> float:
        """Unix seconds by the store's own clock, the same one for all processes."""

    @abstractmethod
    def changed_elsewhere(self) -> bool:
        """Whether another process committed since the last call. Costs a few microseconds.

        Where shared transactions run beside each other, theirs do not count.
        """

    @abstractmethod
    def erase_deleted(self) -> bool:
        """Have the engine forget what was deleted, as far as it can; whether that was possible now:
        else to be tried again."""

    @abstractmethod
    def close(self) -> None:
        """Close; the store is whole without this too. May be called twice."""


class Table:
    """What asks and writes one table, or some that go together, in the database that all share.

    ``fixed``: columns that have these values in all rows that are asked for or written.
    """

    def __init__(self, database: Database, **fixed: Any) -> None:
        self._database, self._fixed = database, fixed
        self.when_kept = database.when_kept

    def _all(
        self, kind: type[Row], table: str, tail: str = "", /, *values: Any, **equal: Any
    ) -> Iterator[Row]:
        """The rows in which columns are ``equal`` to these. ``tail``: further conditions, each
        behind an AND, order and limit, and their ``values``."""
        columns = columns_of(kind)
        where, given = self._where(equal)
        sql = f"SELECT {', '.join(columns.names)} FROM {table} {where} {tail}"
        yield from map(columns.read, self._database.rows(sql, [*given, *values]))

    def _find(
        self, kind: type[Row], table: str, tail: str = "", /, *values: Any, **equal: Any
    ) -> Row | None:
        """The first of them; None for none."""
        return next(self._all(kind, table, f"{tail} LIMIT 1", *values, **equal), None)

    def _among(
        self, kind: type[Row], table: str, name: str, values: Sequence[Any]
    ) -> Iterator[Row]:
        """The rows in which a column has one of these values, in no order."""
        columns = columns_of(kind)
        sql = f"SELECT {', '.join(columns.names)} FROM {table} WHERE {name}"
        yield from map(columns.read, self._database.rows_in(sql, values))

    def _value(self, what: str, table: str, tail: str = "", /, *values: Any, **equal: Any) -> Any:
        """``what`` of them: a column or a sum; None without rows."""
        where, given = self._where(equal)
        row = self._database.row(f"SELECT {what} FROM {table} {where} {tail}", [*given, *values])
        return None if row is None else row[0]

    def _count(self, table: str, tail: str = "", /, *values: Any, **equal: Any) -> int:
        return int(self._value("count(*)", table, tail, *values, **equal))

    def _put(self, table: str, row: Any, /, *, replace: bool = True, **more: Any) -> None:
        """Write a row, with ``more`` columns; in the place of one of its key, if any."""
        values = {**self._fixed, **columns_of(type(row)).write(row), **more}
        self._database.insert(table, values, replace=replace)

    def _change(self, table: str, to: Mapping[str, Any], tail: str = "", /, **equal: Any) -> int:
        """Set these columns in the rows that :meth:`_all` has; how many those were."""
        where, given = self._where(equal)
        sql = f"UPDATE {table} SET {', '.join(f'{name} = ?' for name in to)} {where} {tail}"
        return self._database.execute(sql, [*to.values(), *given])

    def _delete(self, table: str, tail: str = "", /, *values: Any, **equal: Any) -> int:
        """Likewise."""
        where, given = self._where(equal)
        return self._database.execute(f"DELETE FROM {table} {where} {tail}", [*given, *values])

    def _where(self, equal: Mapping[str, Any]) -> tuple[str, list[Any]]:
        every = {**self._fixed, **equal}
        said = " AND ".join(f"{name} = ?" for name in every) or "TRUE"
        return f"WHERE {said}", list(every.values())


class TableOfTask(Table):
    """One task's rows of such a table."""

    def __init__(self, database: Database, task: int) -> None:
        super().__init__(database, task=task)
        self._task = task

    def _by_device(
        self, kind: type[Row], table: str, device_ids: Sequence[bytes] | None = None
    ) -> dict[bytes, Row]:
        """What is known of each device, or of these, by its id."""
        columns = columns_of(kind)
        sql = f"SELECT device_id, {', '.join(columns.names)} FROM {table} WHERE task = {self._task}"
        if device_ids is None:
            found = self._database.rows(sql)
        else:
            found = self._database.rows_in(f"{sql} AND device_id", device_ids)
        return {device_id: columns.read(rest) for device_id, *rest in found}
