"""How long ago rounds opened, by the monotonic clock."""

from __future__ import annotations

from collections.abc import Callable

from aggregator.store.rounds import RoundRow

_MOST_KEPT = 256


class RoundTimes:
    """A calendar that is set while a round is open makes it no longer, or shorter, nor an update
    of it later. It is asked once for each round, when the round is first asked for: as it opens,
    or how long it had been open already when this process came. So a figure for a round that saw
    a restart goes by the calendar up to there.

    ``clock``: monotonic seconds; ``unix_clock``: the time that is signed.
    """

    def __init__(self, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        self._clock, self._unix_clock = clock, unix_clock
        self._opened_seconds: dict[int, float] = {}

    def since_opening_seconds(self, row: RoundRow) -> float:
        """How long ago it opened."""
        now = self._clock()
        if row.round in self._opened_seconds:
            return now - self._opened_seconds[row.round]
        passed = max(0.0, self._unix_clock() - row.opened_unix_seconds)
        self._opened_seconds[row.round] = now - passed
        if len(self._opened_seconds) > _MOST_KEPT:
            del self._opened_seconds[min(self._opened_seconds)]
        return passed

    def late_seconds(self, row: RoundRow) -> float | None:
        """How long after a closed round's opening an update comes now that it would have counted
        if it had lasted to its deadline; None where that is over."""
        seconds = self.since_opening_seconds(row)
        return seconds if seconds <= row.length_seconds else None
