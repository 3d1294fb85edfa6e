"""The clock that durations and the aggregator's time are carried on with."""

from __future__ import annotations

import time

__all__ = ["awake_clock"]


def awake_clock() -> float:
    """Monotonic seconds that count the machine's sleep where the system can tell.

    A device that slept over a deadline must notice when it wakes.
    """
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_time is None else time.clock_gettime(boot_time)
