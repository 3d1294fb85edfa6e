"""What a process opened is its own: a forked child has a copy of each handle, and no right to it.

An inherited handle is refused in the child, and never closed there, not at its exit either: what
closing would do (SQLite's locks and journal, a goodbye to a server) concerns the parent.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from types import TracebackType
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


class OwnedLock:
    """A lock for the threads of the process that made it. In a fork it is refused at once: whoever
    held it may be a thread that the fork does not have."""

    def __init__(self, owner: Owner) -> None:
        self._owner, self._lock = owner, threading.RLock()

    def __enter__(self) -> None:
        self._owner.require()
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class OwnedConnection:
    """An SQLite connection to the file ``path``. ``options``: of ``sqlite3.connect``.

    Raises ForkedError for a file that was open here when this process was forked: SQLite has
    copied what the parent's locks were, and would go by them.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self.owner = Owner(str(path))
        if _file(path) in _inherited_files:
            raise ForkedError(
                f"{path} was open when this process was forked, and SQLite cannot open it here "
                "without harm to it: fork before it is opened, or let multiprocessing spawn "
                "processes and fork none"
            )
        self._connection: sqlite3.Connection = sqlite3.connect(path, **options)
        self._path = path
        _connections.add(self)

    @property
    def here(self) -> sqlite3.Connection:
        """The connection. Raises ForkedError in a fork."""
        self.owner.require()
        return self._connection

    def close(self) -> None:
        """Close it; in a fork, leave it alone. May be called twice."""
        if self.owner.is_here:
            self._connection.close()
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


_connections: WeakSet[OwnedConnection] = WeakSet()
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
