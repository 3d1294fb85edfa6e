"""Time: the clocks, a slower device emulated, and the wait before the next try."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

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

    now = staticmethod(time.perf_counter)
    """Seconds since an arbitrary start, from the operating system's performance counter."""

    def sleep(self, seconds: float) -> None:
        """Return as exactly after `seconds` as the machine can."""
        end = time.perf_counter() + seconds
        if seconds > _WAKE_UP_SECONDS:
            time.sleep(seconds - _WAKE_UP_SECONDS)
        while time.perf_counter() < end:
            pass


# A slower device, emulated by sleeping.


def slowed(clock: Clock, start: float, slowdown: float) -> float:
    """Seconds since `start` on a device `slowdown` times slower, the rest of which pass here.

    Sleeps (slowdown - 1) times the work's own duration.
    """
    worked = clock.now() - start
    pause = (slowdown - 1.0) * worked
    if pause <= 0.0:
        return worked
    clock.sleep(pause)
    return clock.now() - start


# The clock that durations and the aggregator's time are carried on with.


awake_clock: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
"""Monotonic seconds that count the machine's sleep where the system can tell.

A device that slept over a deadline must notice when it wakes.
"""


class Backoff:
    """Waits of uniform(c / 10, c) seconds; c starts at ``first_seconds`` and doubles at each try.

    Raises ValueError unless 0 < ``first_seconds`` <= ``most_seconds``.
    """

    def __init__(
        self, rng: np.random.Generator, *, first_seconds: float, most_seconds: float
    ) -> None:
        if not 0 < first_seconds <= most_seconds:
            raise ValueError(
                f"back-off from {first_seconds} to {most_seconds} seconds; "
                "expected 0 < first <= most"
            )
        self._rng = rng
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self._tries = 0

    def next_seconds(self) -> float:
        """How long to wait before the next try."""
        # 2^64 tries never come; the cap keeps the power from overflowing a float.
        ceiling = min(self._most_seconds, self._first_seconds * 2.0 ** min(self._tries, 64))
        self._tries += 1
        return float(self._rng.uniform(ceiling / 10, ceiling))

    def reset(self) -> None:
        """Start from the first wait again: the last try went well."""
        self._tries = 0
