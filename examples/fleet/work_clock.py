"""The time that a device's work takes, when many devices share a core."""

from __future__ import annotations

import threading
import time

__all__ = ["WorkClock"]


class WorkClock:
    """Processor seconds of the calling thread plus what it slept; a capability clock.

    A device in the demo has dozens of neighbours on its core that a real one has not. By the
    machine's clock it would measure them.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def now(self) -> float:
        """Seconds since an arbitrary start, of this thread only."""
        return time.thread_time() + self._slept()

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass on this clock; a busy machine may take longer to wake up."""
        time.sleep(seconds)
        self._of_thread.slept = self._slept() + seconds

    def _slept(self) -> float:
        slept: float = getattr(self._of_thread, "slept", 0.0)
        return slept
