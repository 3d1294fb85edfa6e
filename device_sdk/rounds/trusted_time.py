"""The aggregator's time, carried on by the monotonic clock between sessions' replies."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["TrustedTime"]


class TrustedTime:
    """Unix time that a session's reply gave and that never falls.

    The device's own calendar clock is not asked: on small boards it is often wrong, and whoever can
    set it could bring old manifests back to life. ``clock``: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], largest_unix_seconds: int) -> None:
        self._clock = clock
        self._largest_unix_seconds = float(largest_unix_seconds)
        self._at_seconds: float | None = None

    def set(self, unix_seconds: int) -> None:
        """Take the time of a session's reply."""
        # What was reached before stays: a session whose time lies behind moves nothing back.
        self._largest_unix_seconds = max(self._largest_unix_seconds, self.now() or 0.0)
        self._largest_unix_seconds = max(self._largest_unix_seconds, float(unix_seconds))
        self._at_seconds = self._clock()

    def now(self) -> float | None:
        """Unix seconds; None before the first session."""
        if self._at_seconds is None:
            return None
        return self._largest_unix_seconds + (self._clock() - self._at_seconds)

    @property
    def largest_unix_seconds(self) -> int:
        """The largest time seen, to be stored."""
        now = self.now()
        return int(self._largest_unix_seconds if now is None else now)

    def clock_seconds(self, unix_seconds: float) -> float | None:
        """The monotonic time at which ``unix_seconds`` comes; None before the first session."""
        now = self.now()
        return None if now is None else self._clock() + (unix_seconds - now)
