"""A slower device, emulated by sleeping."""

from __future__ import annotations

import math
from collections.abc import Callable

from device_sdk.system.clock import Clock


def checked_slowdown(slowdown: float) -> float:
    """The factor as a float. Raises ValueError below 1, for NaN and for infinity."""
    if not (math.isfinite(slowdown) and slowdown >= 1.0):
        raise ValueError(
            f"slowdown is {slowdown}; expected a finite factor of 1 or more "
            "(8 emulates a device that takes 8 times as long)"
        )
    return float(slowdown)


def timed(run: Callable[[], object], clock: Clock, slowdown: float, stop_at: float) -> float:
    """Seconds that one run takes on a device `slowdown` times slower than this one.

    Sleeps (slowdown - 1) times the run's own duration inside the measured span. A sleep that would
    outlast `stop_at` ends there: what was left of it is known, so it is added without waiting.
    """
    start = clock.now()
    run()
    worked = clock.now() - start
    pause = (slowdown - 1.0) * worked
    room = stop_at - clock.now()
    if pause <= 0.0:
        return worked
    if pause > room:
        if room > 0.0:
            clock.sleep(room)
        return worked + pause
    clock.sleep(pause)
    return clock.now() - start
