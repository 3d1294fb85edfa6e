"""Rules for the names an artifact may carry."""

from __future__ import annotations

import re

from device_sdk.artifact.errors import ArtifactError

MAX_NAME_LENGTH = 512
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
# Names that open a device instead of a file on Windows, whatever their extension.
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|\Z)", re.IGNORECASE)


def checked_name(name: object, what: str) -> str:
    """A non-empty printable string of at most MAX_NAME_LENGTH characters."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        shown = repr(name)[:80]
        raise ArtifactError(
            f"{what}: {shown} is no name: expected 1 to {MAX_NAME_LENGTH} printable characters"
        )
    return name


def checked_file_name(name: object) -> str:
    """A plain file name: no folder, no leading dot, ASCII letters, digits, '.', '-' and '_'."""
    if not isinstance(name, str) or not _FILE_NAME.match(name) or _RESERVED.match(name):
        raise ArtifactError(
            f"{repr(name)[:80]} is not allowed as a file name: an artifact's files lie directly in "
            "its folder and are named in ASCII letters, digits, '.', '-' and '_'"
        )
    return name
