"""A file that one process at a time holds; the system lets go of it when the process ends."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FileLock"]


class FileLock:
    """``path`` is made, mode 0600, if it is not there; what is in it does not matter.

    Two locks on one path exclude each other within a process too.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def try_acquire(self) -> bool:
        """Take the lock if nobody else has it; whether that worked. Never waits."""
        try:
            _lock(self._handle)
        except OSError:
            return False
        return True

    def release(self) -> None:
        """Let others have it."""
        _unlock(self._handle)

    def close(self) -> None:
        """Let go of it for good. May be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]

    def _unlock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]

else:

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_UN)
