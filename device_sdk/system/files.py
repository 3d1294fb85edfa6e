"""Files that are as they were or as they should be, whatever happens in between."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# What was written is on the disk, not in a cache: for files and folders.

try:
    import fcntl
except ImportError:  # Windows
    _FULL_FLUSH = None
else:
    # macOS: its fsync leaves the data in the drive's own cache, and says so in its manual.
    _FULL_FLUSH = getattr(fcntl, "F_FULLFSYNC", None)


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


_ZEROS = bytes(1 << 20)


def erase_file(path: Path) -> None:
    """Overwrite a file with zeros, flush it, and remove it; nothing where there is none.

    Whoever reads its blocks afterwards finds nothing of it, as far as the file system writes where
    it wrote before: one that copies what it writes, and a disk that spreads it, may not.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return
    with open(descriptor, "wb", buffering=0) as file:
        left = os.fstat(descriptor).st_size
        while left > 0:
            left -= file.write(_ZEROS[:left]) or 0
        flush_file(descriptor)
    path.unlink(missing_ok=True)
    flush_folder(path.parent)


# Reading what may be anything by now.


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file; one that is made is its owner's. Raises OSError, for what is no
    regular file too: nothing waits for a pipe's other end."""
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_small(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of a file that has to fit into memory. Raises OSError, for a larger one too."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            said = f"it has {size} bytes, expected at most {max_bytes}"
            raise OSError(errno.EFBIG, said, str(path))
        return file.read(size)


def read_end(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The last lines of a file, whole ones, as many as fit. Raises OSError."""
    with open(open_regular(path), "rb") as file:
        before = max(0, os.fstat(file.fileno()).st_size - max_bytes)
        if not before:
            return file.read(max_bytes)
        file.seek(before - 1)
        return file.read(max_bytes + 1).partition(b"\n")[2]


# Replacing a file so that a crash at any moment leaves the old or the new one, whole.


def replaceable(path: str | os.PathLike[str]) -> Path:
    """The file that a path means, behind all links; there may be none yet.

    Raises OSError for what is no file, such as a folder, a device or a pipe.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, name a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file, name one", str(path))
    return Path(os.path.realpath(path))


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write to `.NAME.partial` beside the file, flush to disk, rename, flush the folder.

    A link stays, and what it leads to is replaced. The file is readable by its owner only. A crash
    may leave the partial file, which the next write replaces; so only one process at a time may
    write to a path. Raises OSError, and then what was there is as it was.
    """
    path = replaceable(path)
    partial = path.with_name(f".{path.name}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(partial, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            flush_file(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)
