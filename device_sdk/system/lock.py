"""A lock that keeps a home folder to one process, released by the system when that one dies."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from device_sdk.home.errors import HomeLocked

__all__ = ["HomeLock"]


class HomeLock:
    """Holds ``path`` locked until :meth:`release`. Raises :class:`HomeLocked`.

    Two processes with one identity would send two different updates for one round.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(self._descriptor)
        except OSError:
            holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise HomeLocked(
                f"{path.parent} is in use by {who}: stop it first, or give each process a home of "
                "its own (reading status and recommendations needs no lock: read_only=True)"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Give the folder back. May be called twice."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


if sys.platform == "win32":
    import msvcrt

    # A byte far behind the content: Windows' locks keep others from reading what they cover.
    _FAR = 1 << 20

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, _FAR, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        # flock, not lockf: it also keeps two Devices of one process apart.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
