"""When to train: ready answers for ``TrainingOptions(only_when=...)``.

Each is a function without arguments that looks at the machine anew at every call. Combine them as
you like: ``only_when=lambda: mains() and idle()``. Where the platform does not tell, they answer
``unknown``, which is True unless you say otherwise: a machine that keeps silent is mostly one
without a battery, and one that would never train is not noticed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from device_sdk.system.printable import in_words

_POWER_SUPPLY = Path("/sys/class/power_supply")
_PMSET, _PMSET_SECONDS = "/usr/bin/pmset", 5.0
_log = logging.getLogger("tessera.device")


def on_mains_power(*, unknown: bool = True, folder: Path = _POWER_SUPPLY) -> Callable[[], bool]:
    """Whether the machine runs on mains (or USB) power, or has no battery at all.

    Linux: ``/sys/class/power_supply`` (``folder``); macOS: ``pmset``. Elsewhere, and where these
    are missing, ``unknown``.
    """

    def ask() -> bool:
        found = _pmset() if sys.platform == "darwin" else _sysfs(folder)
        return unknown if found is None else found

    return ask


def _sysfs(folder: Path) -> bool | None:
    """As systemd decides it: a supply that is online settles it, then a battery that drains."""
    try:
        supplies = sorted(folder.iterdir())
    except OSError:
        return None
    offline = drains = False
    for supply in supplies:
        if _word(supply / "scope") == "Device":
            continue  # of a mouse, say
        if _word(supply / "type") == "Battery":
            drains |= _word(supply / "status") == "Discharging"
            continue
        online = _word(supply / "online")
        if online.isdecimal() and int(online) > 0:
            return True
        offline |= online == "0"
    return not (offline or drains)


def _word(path: Path) -> str:
    """A one-line file's content; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _pmset() -> bool | None:
    try:
        said = subprocess.run(
            [_PMSET, "-g", "ps"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PMSET_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    if "'Battery Power'" in said:
        return False
    return True if "'AC Power'" in said else None


def when_idle(
    seconds: float = 60.0, *, most_load: float = 0.25, unknown: bool = True
) -> Callable[[], bool]:
    """Whether the machine had little to do for ``seconds`` (at most 900).

    Judged by the load average of the last 1, 5 or 15 minutes, the shortest that covers ``seconds``:
    at most ``most_load`` for each processor. A training of this device counts, too: the next one
    begins when its load has faded from the average. Linux and macOS; elsewhere ``unknown``. Raises
    ValueError for values outside of these.
    """
    if not 0 < seconds <= 900:
        raise ValueError(f"seconds is {seconds!r}; expected above 0 and at most 900")
    if not most_load > 0:
        raise ValueError(f"most_load is {most_load!r}; expected above 0")
    which = 0 if seconds <= 60 else 1 if seconds <= 300 else 2

    def ask() -> bool:
        try:
            load = os.getloadavg()[which]
        except (OSError, AttributeError):
            return unknown
        return load <= most_load * (os.cpu_count() or 1)

    return ask


class Gate:
    """Asks an app's ``only_when``, at most every ``ask_seconds`` while a round waits for a yes.

    ``clock``: monotonic seconds.
    """

    def __init__(
        self, only_when: Callable[[], bool], ask_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._only_when = only_when
        self._ask_seconds = ask_seconds
        self._clock = clock
        self._waits_for: object = None
        self.next_seconds = 0.0
        """When to ask again, by the clock, while something waits."""
        self.problem = ""
        """How the last call failed; empty where it did not."""

    def opens_for(self, work: object) -> bool:
        """Whether ``work`` may begin now; the same answer until it is time to ask again."""
        now = self._clock()
        if work is self._waits_for and now < self.next_seconds:
            return False
        try:
            answer = bool(self._only_when())
        except BaseException as error:  # sys.exit() too: the device's thread goes on
            answer = False
            if not self.problem:
                _log.exception("only_when failed; it counts as False")
            self.problem = f"only_when failed: {in_words(error)}"
        else:
            self.problem = ""
        self._waits_for, self.next_seconds = (None if answer else work), now + self._ask_seconds
        return answer
