"""A file that one process at a time holds; the system lets go of it when the process ends."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

_MOST_BYTES = 1 << 16
_LOOKS, _PAUSE_SECONDS = 3, 0.01
_TRIES = 100


class LiveFile:
    """Written by the running process, which holds a lock on it as long as it runs.

    The system lets go of that lock when the process dies, however it does, so what one left behind
    is known for what it is. Nothing is flushed to the disk: after a crash it means nothing.
    Failures to write are swallowed: this is for looking only.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: FileLock | None = None

    def tell(self, said: Mapping[str, Any]) -> None:
        """Write what JSON can hold, and ``process``, this process's number."""
        try:
            if self._lock is None:
                self._lock = _held(self._path)
            if self._lock is not None:
                self._lock.write(json.dumps({**said, "process": os.getpid()}).encode())
        except OSError:
            return

    def close(self) -> None:
        """The process does not run any more."""
        if self._lock is not None:
            with suppress(OSError):
                self._lock.write(b"")
            self._lock.close()
        self._lock = None


def read_live_file(path: Path) -> bytes:
    """What a running process wrote; empty where none runs, or it cannot be known."""
    found = b""
    for look in range(_LOOKS):
        if look:
            time.sleep(_PAUSE_SECONDS)
        try:
            if not path.is_file():
                return b""
            lock = FileLock(path)
            try:
                # Another reader may hold it for a moment, too: only what is held for longer runs.
                if lock.try_acquire():
                    return b""
            finally:
                lock.close()
            with path.open("rb") as file:
                found = file.read(_MOST_BYTES)
        except OSError:
            return b""
    return found


def _held(path: Path) -> FileLock | None:
    """The file's lock. Readers take it for a moment to see whether anybody holds it."""
    lock = FileLock(path)
    for _ in range(_TRIES):
        if lock.try_acquire():
            return lock
        time.sleep(_PAUSE_SECONDS)
    lock.close()
    return None


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


class FileLock:
    """``path`` is made, mode 0600, if it is not there; it holds its last holder's process number.

    Two locks on one path exclude each other within a process too. A fork has none of its parent's.
    """

    def __init__(self, path: Path) -> None:
        self._file = OwnedHandle(path, os.open(path, os.O_RDWR | os.O_CREAT, 0o600))

    @property
    def _handle(self) -> int:
        return self._file.number

    def try_acquire(self) -> bool:
        """Take the lock if nobody else has it; whether that worked. Never waits."""
        try:
            _lock(self._handle)
        except OSError:
            return False
        return True

    def is_taken(self) -> bool:
        """Whether somebody else has it. Any number may look at once, and none takes another's look
        for a holder (on Windows for as long as it takes, one does)."""
        try:
            _look(self._handle)
        except OSError:
            return True
        _unlock(self._handle)
        return False

    def sign(self) -> None:
        """As who holds it: leave this process's number for :meth:`holder`."""
        self.write(f"{os.getpid()}\n".encode())

    def write(self, content: bytes) -> None:
        """Leave this in the file, in place of what stands there. Others may see a part of it."""
        os.ftruncate(self._handle, 0)
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.write(self._handle, content)

    def holder(self) -> str:
        """Who signed it last, in words."""
        os.lseek(self._handle, 0, os.SEEK_SET)
        number = os.read(self._handle, 32).decode("ascii", "replace").strip()
        return f"process {number}" if number.isdigit() else "another process"

    def release(self) -> None:
        """Let others have it."""
        _unlock(self._handle)

    def close(self) -> None:
        """Let go of it for good. May be called twice; a fork closes its copy, and lets go of
        nothing."""
        if self._handle >= 0 and self._file.owner.is_here:
            with suppress(OSError):  # nobody held it
                self.release()  # for a fork that has not closed its copy yet
        self._file.close()


if sys.platform == "win32":
    import msvcrt

    # A byte far behind the content: Windows' locks keep others from reading what they cover.
    _FAR = 1 << 20

    def _lock(handle: int) -> None:
        os.lseek(handle, _FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

    _look = _lock

    def _unlock(handle: int) -> None:
        os.lseek(handle, _FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(handle: int) -> None:
        # flock, not lockf: it also keeps two locks of one process apart.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _look(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _unlock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_UN)
