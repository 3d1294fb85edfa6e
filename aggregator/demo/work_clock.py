"""The time that an emulated device's work takes, when many devices share a core."""

from __future__ import annotations

import threading
import time
from collections import deque
from statistics import median

import numpy as np

_RECENT = 9
# Work shorter than this says little; the yardstick is not worth its time then.
_LEAST_WORK_SECONDS = 3e-4
_LOOKS = 200
_RUNS = 3
_TABLE = np.random.default_rng(0).standard_normal((512, 16), dtype=np.float32)
_ROWS = np.random.default_rng(1).integers(0, 512, 1500)


class WorkClock:
    """Seconds of the calling thread's work plus what it slept; a capability clock.

    A device in the demo has dozens of neighbours on its core that a real one has not. By the
    machine's clock it would measure them; so this one counts the thread's processor time. That too
    depends on the neighbours, by half and more: they share caches, and often the core's units. So
    a short, fixed piece of work, the yardstick, runs beside the device's own, and the clock counts
    in what the yardstick takes: a device that is emulated has one speed, whatever else its host
    does.

    Args:
        reference_seconds: what the yardstick takes on the machine that is emulated, from
            :func:`yardstick_seconds`.
    """

    def __init__(self, reference_seconds: float) -> None:
        if not reference_seconds > 0.0:
            raise ValueError(f"the yardstick takes {reference_seconds} s; expected more than 0")
        self._reference_seconds = reference_seconds
        self._of_thread = threading.local()

    def now(self) -> float:
        """Seconds since an arbitrary start, of this thread only."""
        state = self._state()
        worked = time.thread_time() - state.mark
        if worked >= _LEAST_WORK_SECONDS:
            state.recent.append(_yardstick())
        state.seconds += worked * self._reference_seconds / median(state.recent)
        # What the yardstick took is no work of the device.
        state.mark = time.thread_time()
        return state.seconds

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass on this clock; a busy machine may take longer to wake up."""
        time.sleep(seconds)
        self._state().seconds += seconds

    def _state(self) -> _ThreadState:
        state: _ThreadState | None = getattr(self._of_thread, "state", None)
        if state is None:
            state = self._of_thread.state = _ThreadState()
        return state


class _ThreadState:
    """One thread's clock: ``mark`` is the processor time up to which work has been counted."""

    def __init__(self) -> None:
        self.recent = deque((_yardstick() for _ in range(_RECENT)), maxlen=_RECENT)
        self.seconds = 0.0
        self.mark = time.thread_time()


def yardstick_seconds() -> float:
    """What the yardstick takes on this machine now, in seconds: the median of many looks."""
    return median(_yardstick() for _ in range(_LOOKS))


def _yardstick() -> float:
    """Gathers, products and the interpreter, as a round of training has them."""
    began = time.thread_time()
    for _ in range(_RUNS):
        rows = _TABLE.take(_ROWS, axis=0)
        (rows @ _TABLE[:32].T).sum(axis=1).astype(np.float64)
        sum(range(200))
    return time.thread_time() - began
