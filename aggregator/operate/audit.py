"""Who did what with a fleet, when, and what came of it: a line each in the home."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from aggregator.events import LogEvent
from device_sdk.system.files import flush_file, open_regular, read_end
from device_sdk.wire.seal.enrolment_message import without_codes

DONE = "done"
"""The outcome of what was done."""
_MOST_ENTRY_BYTES, _LEAST_BYTES_READ = 4 << 10, 1 << 20
"""An entry has a few hundred; those of more, and damage, leave fewer of them to be found."""
_LAST_UNIX_SECONDS = 253_402_300_800
"""The year 10000, which no calendar has."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One thing that somebody did, or tried to.

    Attributes:
        actor: who: a user of the operating system or of a console, as it was told.
        action: such as "revoke".
        arguments: with what, without secrets.
        outcome: "done", or why it was not.
    """

    unix_seconds: float
    actor: str
    action: str
    arguments: Mapping[str, Any]
    outcome: str

    def write(self) -> bytes:
        """As it stands in the file: one line of JSON, without any enrolment code."""
        return json.dumps(_without_codes(asdict(self))).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> AuditEntry | None:
        """The inverse of :meth:`write`; None for a line that it did not write."""
        try:
            found = cls(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            return None
        kinds: tuple[Any, ...] = ((int, float), str, str, dict, str)
        said = (getattr(found, each.name) for each in fields(cls))
        sound = all(map(isinstance, said, kinds)) and 0 <= found.unix_seconds < _LAST_UNIX_SECONDS
        return found if sound else None


def _without_codes(said: Any) -> Any:
    """What JSON can write of it, with no enrolment code in any text."""
    if isinstance(said, dict):
        return {str(name): _without_codes(each) for name, each in said.items()}
    if isinstance(said, (list, tuple)):
        return [_without_codes(each) for each in said]
    if said is None or isinstance(said, (bool, int, float)):
        return said
    return without_codes(str(said))


class AuditLog:
    """The file, which only its owner can read. Several processes may add to it at once: each line
    is one write. A line that is damaged is passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, entry: AuditEntry) -> None:
        """Note what was done. It stays done where it cannot be noted: that is logged."""
        try:
            self._append(entry.write())
        except OSError as error:
            LogEvent.ACTION_UNNOTED.log(
                action=entry.action,
                actor=entry.actor,
                outcome=entry.outcome,
                file=self._path,
                problem=error,
            )

    def newest(self, count: int) -> list[AuditEntry]:
        """The newest entries, the newest last, of the end of the file. Raises OSError."""
        try:
            said = read_end(self._path, max(_LEAST_BYTES_READ, count * _MOST_ENTRY_BYTES))
        except FileNotFoundError:
            return []
        entries = filter(None, map(AuditEntry.read, reversed(said.splitlines())))
        return list(islice(entries, max(0, count)))[::-1]

    def _append(self, line: bytes) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        descriptor = open_regular(self._path, flags)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # the last one was cut short, on a full disk
            if (written := os.write(descriptor, line)) != len(line):
                raise OSError(f"only {written} of {len(line)} bytes could be written")
            flush_file(descriptor)
        finally:
            os.close(descriptor)


def system_user() -> str:
    """Whom the operating system takes this process's user for."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user without a name, as in a container
        return f"user {os.getuid()}" if hasattr(os, "getuid") else "unknown"
