"""What only a running process knows, told to others in a file beside what it works on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from device_sdk.system.lock import FileLock

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
