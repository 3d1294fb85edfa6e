"""What only the process that runs a device knows, told to others in a file of the home folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from device_sdk.fields import Declared, plain, read
from device_sdk.system.live_file import LiveFile, read_live_file

_FILE = "running.json"


@dataclass(frozen=True, slots=True)
class Live(Declared):
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


class LiveHome:
    """Tells what a running device is at, see :class:`~device_sdk.system.live_file.LiveFile`.
    ``unix_clock``: Unix seconds."""

    def __init__(self, folder: Path, unix_clock: Callable[[], float]) -> None:
        self._file, self._unix_clock = LiveFile(folder / _FILE), unix_clock
        self._last: Live | None = None

    def tell(self, live: Live) -> None:
        """Write ``live``, if it is another than before."""
        if live != self._last:
            self._last = live
            self._file.tell(plain(replace(live, unix_seconds=int(self._unix_clock()))))

    def close(self) -> None:
        """The process does not run the device any more."""
        self._file.close()
        self._last = None


def read_live(folder: Path) -> Live | None:
    """What a running process says; None where none runs, or it cannot be known."""
    return parse_live(read_live_file(folder / _FILE))


def parse_live(data: bytes) -> Live | None:
    """Of a file's bytes; None for what no device wrote, or has not written whole yet."""
    try:
        return read(Live, json.loads(data))
    except (ValueError, RecursionError):
        return None
