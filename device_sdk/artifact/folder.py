"""Reading an artifact's files without trusting the folder."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.manifest import FileEntry
from device_sdk.artifact.names import checked_file_name


def read_file(folder: Path, name: str, max_bytes: int) -> bytes:
    """The bytes of a regular file that lies in the folder (a link must not leave it)."""
    checked_file_name(name)
    path = folder / name
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve(strict=True)):
            raise ArtifactError(f"{path} is a link that leaves the artifact's folder")
        # Non-blocking, so that a named pipe in the place of a file cannot hang the program.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(real, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ArtifactError(f"{path} is not a regular file")
            if status.st_size > max_bytes:
                raise ArtifactError(
                    f"{path} has {status.st_size} bytes, expected at most {max_bytes}"
                )
            return file.read(max_bytes + 1)
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist: is {folder} an artifact's folder?") from None
    except (OSError, RuntimeError) as error:
        # RuntimeError: how pathlib reports a loop of links before Python 3.13.
        raise ArtifactError(f"{path} cannot be read: {error}") from None


def read_checked(folder: Path, name: str, entry: FileEntry) -> bytes:
    """The bytes of a file whose size and SHA-256 are the manifest's."""
    data = read_file(folder, name, entry.size)
    if len(data) != entry.size:
        raise ArtifactError(
            f"{folder / name} has {len(data)} bytes, the manifest says {entry.size}"
        )
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ArtifactError(f"{folder / name} was changed: its SHA-256 is not the manifest's")
    return data
