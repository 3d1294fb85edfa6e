"""A file that one process at a time holds; the system lets go of it when the process ends."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from device_sdk.system.process import OwnedHandle


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
