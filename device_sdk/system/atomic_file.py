"""Replacing a file so that a crash at any moment leaves the old or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path

from device_sdk.system.durable import flush_file, flush_folder


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write to `.NAME.partial` beside the file, flush to disk, rename, flush the folder.

    The file is readable by its owner only. A crash may leave the partial file, which the next write
    replaces; so only one process at a time may write to a path.
    """
    path = Path(path)
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
