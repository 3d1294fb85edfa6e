"""What was written is on the disk, not in a cache: for files and folders."""

from __future__ import annotations

import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    _FULL_FLUSH = None
else:
    # macOS: its fsync leaves the data in the drive's own cache, and says so in its manual.
    _FULL_FLUSH = getattr(fcntl, "F_FULLFSYNC", None)

__all__ = ["SQLITE_FLUSH_PRAGMAS", "flush_file", "flush_folder"]

SQLITE_FLUSH_PRAGMAS = ("PRAGMA fullfsync = ON", "PRAGMA checkpoint_fullfsync = ON")
"""Make SQLite flush as :func:`flush_file` does; without effect where there is no such flush."""


def flush_file(descriptor: int) -> None:
    """Return when what was written to an open file would survive a power cut."""
    if _FULL_FLUSH is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_FLUSH)
        except OSError:
            pass  # a file system that has no such flush, such as a network's
        else:
            return
    os.fsync(descriptor)


def flush_folder(folder: Path) -> None:
    """The same for the names in a folder: files made, renamed or removed there."""
    if os.name != "posix":
        return  # a folder cannot be opened, and its entries are flushed with the file
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        flush_file(descriptor)
    finally:
        os.close(descriptor)
