"""The search for the largest k that fits: bracket it, refine it, confirm it."""

from __future__ import annotations

from dataclasses import dataclass

from device_sdk.capability.estimate import bounds, largest_fitting, p90_estimates
from device_sdk.capability.stopwatch import Stopwatch

# Ks measured around the crossing. Eight in a row meet every residue modulo the width of a vector
# register, so that the window's average does not depend on where it starts.
_WINDOW = 8
# Blocks that each of them gets, in turns, so that a slow spell of the machine meets all of them.
_PASSES = 4
_LADDER = 4
_CONFIRMATIONS = 3
# Share of the time box after which only the confirmation is left to do.
_REFINE_UNTIL = 0.7


@dataclass(frozen=True)
class Found:
    """The outcome: `k` is 0 where none fits; `out_of_time`: the time box ended before the ks were
    bracketed or the chosen one confirmed.

    `confirmed`: the chosen k was measured again, after the search, and kept the deadline with at
    least half of the headroom.
    """

    k: int
    confirmed: bool
    out_of_time: bool


def find_largest_k(
    stopwatch: Stopwatch, *, limit_seconds: float, deadline_seconds: float, max_k: int
) -> Found:
    """The largest k in 1 to `max_k` whose p90 is at most `limit_seconds`."""
    search = _Search(stopwatch, limit_seconds, deadline_seconds, max_k)
    search.bracket()
    if not stopwatch.runs:
        return Found(0, confirmed=False, out_of_time=True)
    search.refine()
    return search.confirm()


class _Search:
    def __init__(
        self, stopwatch: Stopwatch, limit_seconds: float, deadline_seconds: float, max_k: int
    ) -> None:
        self._stopwatch = stopwatch
        self._limit = limit_seconds
        self._deadline = deadline_seconds
        self._tolerated = (limit_seconds + deadline_seconds) / 2.0
        self._max_k = max_k
        self._leave_seconds = stopwatch.seconds_left() * (1.0 - _REFINE_UNTIL)
        self._out_of_time = False

    def bracket(self) -> None:
        """Climb until a k misses; a step at a time, as a running train step cannot be stopped."""
        k = 1
        while self._measure(k):
            if self._cost(k) > self._limit or k == self._max_k:
                return
            k = min(_LADDER * k, self._max_k)

    def refine(self) -> None:
        """Measure around the crossing until every k there was measured often enough."""
        while True:
            low, high = bounds(self._stopwatch.runs, self._limit, self._max_k)
            if low >= high:
                return
            k = self._next(self._estimate())
            if k is None or self._time_to_confirm() or not self._stopwatch.measure(k):
                return

    def confirm(self) -> Found:
        """Measure the estimate again; step down while it misses, further each time."""
        candidate, step = self._not_past_one(self._estimate()), 1
        while candidate >= 1:
            if not self._measure_again(candidate):
                return Found(self._largest_seen(candidate), False, True)
            if self._keeps(candidate):
                return Found(candidate, True, self._out_of_time)
            if candidate == 1:
                break
            candidate = self._not_past_one(min(candidate - step, self._estimate()))
            step *= 2
        return Found(0, False, self._out_of_time)

    def _not_past_one(self, candidate: int) -> int:
        """The candidate; 1 instead of less where it was seen to fit, whatever the fit line says."""
        return 1 if candidate < 1 and self._stopwatch.p90(1) <= self._limit else candidate

    def _keeps(self, k: int) -> bool:
        if k == 1 and self._stopwatch.p90(1) <= self._limit:
            return True
        estimate = p90_estimates(self._stopwatch.runs)[k]
        return estimate <= self._tolerated and self._stopwatch.p90(k) <= self._deadline

    def _next(self, centre: int) -> int | None:
        """The window's least measured k, the nearest to the centre first; None if all are done."""
        first = max(1, min(centre - _WINDOW // 2 + 1, self._max_k - _WINDOW + 1))
        window = range(first, min(first + _WINDOW, self._max_k + 1))
        todo = [k for k in window if self._stopwatch.blocks(k) < _PASSES]
        return min(
            todo, key=lambda k: (self._stopwatch.blocks(k), abs(k - centre - 0.4)), default=None
        )

    def _measure(self, k: int) -> bool:
        if not self._time_to_confirm() and self._stopwatch.measure(k):
            return True
        self._out_of_time = True
        return False

    def _time_to_confirm(self) -> bool:
        return self._stopwatch.seconds_left() <= self._leave_seconds

    def _measure_again(self, k: int) -> bool:
        """Up to three more blocks; True where at least one was taken just now."""
        if not self._stopwatch.measure(k):
            return False
        for _ in range(_CONFIRMATIONS - 1):
            # The rest of the box is for the next smaller k, should this one miss.
            if self._stopwatch.seconds_left() > self._leave_seconds / 2.0:
                self._stopwatch.measure(k)
        return True

    def _estimate(self) -> int:
        return largest_fitting(self._stopwatch.runs, self._limit, self._max_k)

    def _cost(self, k: int) -> float:
        return p90_estimates(self._stopwatch.runs)[k]

    def _largest_seen(self, at_most: int) -> int:
        """The largest measured k up to `at_most` that kept the deadline; 0 where none did."""
        seen = [k for k in self._stopwatch.runs if k <= at_most]
        return max((k for k in seen if self._keeps(k)), default=0)
