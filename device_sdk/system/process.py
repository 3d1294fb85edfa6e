"""What a process opened is its own: a forked child has a copy of each handle, and no right to it.

An inherited handle is refused in the child, and never closed there, not at its exit either: what
closing would do (SQLite's locks and journal, a goodbye to a server) concerns the parent.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from typing import Any
from weakref import WeakSet


class ForkedError(RuntimeError):
    """A handle of another process was used in a fork of it; the message says what to do."""


class Owner:
    """The process that opened something, ``what`` in words."""

    def __init__(self, what: str) -> None:
        self._what, self._process = what, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and no fork of it."""
        return os.getpid() == self._process

    def require(self) -> None:
        """Raises ForkedError in a fork."""
        if not self.is_here:
            raise ForkedError(
                f"{self._what} was opened in process {self._process}; this is process "
                f"{os.getpid()}, a fork of it. Open it here, after the fork, and not before: "
                "only one process at a time may have it"
            )


class LockedConnection:
    """An SQLite connection to the file ``path``, for one thread at a time of the process that
    opened it: whoever uses it has it by ``with``, which holds its lock, or asks :meth:`rows` or
    :meth:`row`. A thread may hold it several times over. ``options``: of ``sqlite3.connect``.

    Raises ForkedError in a fork, whoever held the lock: that may be a thread which the fork does
    not have. So is refused a file that was open here when this process was forked: SQLite has
    copied what the parent's locks were, and would go by them.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self._owner, self._lock = Owner(str(path)), threading.RLock()
        if _file(path) in _inherited_files:
            raise ForkedError(
                f"{path} was open when this process was forked, and SQLite cannot open it here "
                "without harm to it: fork before it is opened, or let multiprocessing spawn "
                "processes and fork none"
            )
        self._connection: sqlite3.Connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, **options
        )
        self._path = path
        _connections.add(self)

    def __enter__(self) -> sqlite3.Connection:
        self._owner.require()
        self._lock.acquire()
        return self._connection

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with self as sql:
            return sql.execute(query, values).fetchall()

    def row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        """The first row of a query."""
        with self as sql:
            found: tuple[Any, ...] | None = sql.execute(query, values).fetchone()
            return found

    def close(self) -> None:
        """Close it; in a fork, leave it alone. May be called twice."""
        if self._owner.is_here:
            with self as sql:
                sql.close()
            _connections.discard(self)

    def forked(self) -> None:
        """This is a child: the connection lives for as long as it does, untouched."""
        import ctypes  # for forks alone

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        _inherited_files.add(_file(self._path))


class OwnedHandle:
    """The descriptor of a file that is locked. A fork closes its copy as it begins: a lock that
    nobody lets go of lasts for as long as anybody has the file open."""

    def __init__(self, path: Path, number: int) -> None:
        self.owner, self.number = Owner(str(path)), number
        _handles.add(self)

    def close(self) -> None:
        """May be called twice."""
        number, self.number = self.number, -1
        _handles.discard(self)
        if number >= 0:
            os.close(number)


_connections: WeakSet[LockedConnection] = WeakSet()
_handles: WeakSet[OwnedHandle] = WeakSet()
_inherited_files: set[tuple[int, int]] = set()


def _file(path: Path) -> tuple[int, int]:
    """What SQLite knows a file by; a name of its own for one that is not there."""
    try:
        status = path.stat()
    except OSError:
        return (-1, -1)
    return (status.st_dev, status.st_ino)


def _forked() -> None:
    for handle in list(_handles):
        handle.close()
    for connection in list(_connections):
        connection.forked()
    _connections.clear()
    _inherited_files.discard((-1, -1))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
