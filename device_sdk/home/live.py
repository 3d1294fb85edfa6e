"""What only the process that runs a device knows, told to others in a file of the home folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from device_sdk.system.lock import FileLock

_FILE = "running.json"
_MOST_BYTES = 1 << 16
_LOOKS, _PAUSE_SECONDS = 3, 0.01
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Live:
    """The state of a running device.

    Attributes:
        connected, session: whether broker and aggregator are reached.
        working_on: the rounds in hand, by their tasks.
        problem: what is wrong now with all that the device does; empty for nothing.
        problems: what is wrong with single tasks, by their names.
        process: the process's number.
        unix_seconds: since when it is so, by the machine's clock.
    """

    connected: bool = False
    session: bool = False
    working_on: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    problems: Mapping[str, str] = field(default_factory=dict)
    process: int = 0
    unix_seconds: int = 0

    def problem_of(self, task: str) -> str:
        """What keeps a task from going well; empty for nothing."""
        return self.problem or self.problems.get(task, "")

    @property
    def any_problem(self) -> str:
        """The first thing that is wrong, of whichever task; empty for nothing."""
        return self.problem or next(iter(self.problems.values()), "")


class LiveFile:
    """Written by the running process, which holds a lock on it as long as it runs.

    The system lets go of that lock when the process dies, however it does, so what one left behind
    is known for what it is. Nothing is flushed to the disk: after a crash it means nothing.
    ``unix_clock``: Unix seconds. Failures to write are swallowed: this is for looking only.
    """

    def __init__(self, folder: Path, unix_clock: Callable[[], float]) -> None:
        self._path, self._unix_clock = folder / _FILE, unix_clock
        self._lock: FileLock | None = None
        self._last: Live | None = None

    def tell(self, live: Live) -> None:
        """Write ``live``, if it is another than before."""
        if live == self._last:
            return
        self._last = live
        told = asdict(live) | {"process": os.getpid(), "unix_seconds": int(self._unix_clock())}
        try:
            if self._lock is None:
                self._lock = _held(self._path)
            if self._lock is not None:
                self._lock.write(json.dumps(told).encode())
        except OSError:
            return

    def close(self) -> None:
        """The process does not run the device any more."""
        if self._lock is not None:
            with suppress(OSError):
                self._lock.write(b"")
            self._lock.close()
        self._lock = self._last = None


def read_live(folder: Path) -> Live | None:
    """What a running process says; None where none runs, or it cannot be known."""
    path = folder / _FILE
    found = None
    for look in range(_LOOKS):
        if look:
            time.sleep(_PAUSE_SECONDS)
        try:
            if not path.is_file():
                return None
            lock = FileLock(path)
            try:
                # Another reader may hold it for a moment, too: only what is held for longer runs.
                if lock.try_acquire():
                    return None
            finally:
                lock.close()
            with path.open("rb") as file:
                found = parse_live(file.read(_MOST_BYTES))
        except OSError:
            return None
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


def parse_live(data: bytes) -> Live | None:
    """Of a file's bytes; None for what no device wrote, or has not written whole yet."""
    try:
        values = json.loads(data)
        live = Live(**{field.name: values[field.name] for field in fields(Live)})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    whole = (
        isinstance(live.connected, bool)
        and isinstance(live.session, bool)
        and isinstance(live.problem, str)
        and isinstance(live.working_on, dict)
        and all(type(number) is int for number in live.working_on.values())
        and isinstance(live.problems, dict)
        and all(isinstance(text, str) for text in live.problems.values())
        and type(live.process) is int
        and type(live.unix_seconds) is int
    )
    return live if whole else None
