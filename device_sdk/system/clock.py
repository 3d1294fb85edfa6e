"""The clock that capability measures with, as an argument so that tests can pass their own."""

from __future__ import annotations

import time
from typing import Protocol

# The kernel may wake a sleeper this much too late; the rest of a pause is spent spinning.
_WAKE_UP_SECONDS = 0.002


class Clock(Protocol):
    """Seconds that never run backwards, and a way to let them pass."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""

    def sleep(self, seconds: float) -> None:
        """Return once `seconds` (not negative) have passed."""


class MonotonicClock:
    """The machine's clock, with sub-millisecond sleeps."""

    def now(self) -> float:
        """Seconds since an arbitrary start, from the operating system's performance counter."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Return as exactly after `seconds` as the machine can."""
        end = time.perf_counter() + seconds
        if seconds > _WAKE_UP_SECONDS:
            time.sleep(seconds - _WAKE_UP_SECONDS)
        while time.perf_counter() < end:
            pass


# The clock that durations and the aggregator's time are carried on with.


def awake_clock() -> float:
    """Monotonic seconds that count the machine's sleep where the system can tell.

    A device that slept over a deadline must notice when it wakes.
    """
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_time is None else time.clock_gettime(boot_time)
