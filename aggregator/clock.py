"""The time that an aggregator signs: its calendar's, without the calendar's jumps."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable

from aggregator.events import LogEvent
from aggregator.store import Store

_LOOK_SECONDS = 1.0
SETTLE_SECONDS = 60.0
"""For so long a calendar has to keep to its new time before that is signed."""
_NOTICED_SECONDS = 0.5
_SAID_SECONDS = 5.0


class SteadyClock:
    """Unix seconds, carried on by a monotonic clock from what the calendar said at the start.

    A calendar that is set while we serve (NTP at boot, an operator, a virtual machine that was
    moved) is followed once it has kept to its new time for a minute. One that goes back and forth
    is not followed at all, nor one set past the end of what the root key's delegation allows. So
    what is signed jumps seldom, never twice for one mistake, and rounds keep their lengths.

    ``clock``: monotonic seconds; ``calendar``: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float], calendar: Callable[[], float]) -> None:
        self._clock, self._calendar = clock, calendar
        self._offset = calendar() - clock()
        self._set_to = math.nan
        self._say_again_seconds = -math.inf
        self._since_seconds = self._look_at_seconds = clock()
        self.problem = ""
        """How the calendar and the time that is signed differ, for people; empty: they do not."""

    def __call__(self) -> float:
        return self._clock() + self._offset

    def look(self, end_unix_seconds: float) -> None:
        """Compare with the calendar, once a second; no time from ``end_unix_seconds`` on is
        followed. Raises what the calendar raises."""
        now = self._clock()
        if now < self._look_at_seconds:
            return
        self._look_at_seconds = now + _LOOK_SECONDS
        offset = self._calendar() - now
        if abs(offset - self._offset) < _NOTICED_SECONDS:
            self._set_to = math.nan
            self._tell("")
        elif not abs(offset - self._set_to) < _NOTICED_SECONDS:
            self._set_to, self._since_seconds = offset, now
            self._tell(
                self._words(
                    "rounds go on by the time before until it has kept to the new "
                    f"one for {SETTLE_SECONDS:.0f} s"
                )
            )
        elif now + offset >= end_unix_seconds:
            self._tell(
                self._words(
                    "that is past the end of the root key's delegation, so rounds "
                    "go on by the time before: set the clock right or, if it is "
                    "right, run tessera-aggregator rotate keys"
                )
            )
        elif now - self._since_seconds >= SETTLE_SECONDS:
            if self.problem:
                LogEvent.CLOCK_FOLLOWED.log(now=moment_of(now + offset))
            self._offset = offset
            self.problem = ""

    def _words(self, what: str) -> str:
        apart = self._set_to - self._offset
        if abs(apart) < _SAID_SECONDS:
            return ""
        way = "ahead" if apart > 0 else "back"
        return (
            f"the clock was set {way} by {abs(apart):,.0f} s, to "
            f"{moment_of(self._clock() + self._set_to)}; {what}"
        )

    def _tell(self, problem: str) -> None:
        now = self._clock()
        if problem and problem != self.problem:
            if now >= self._say_again_seconds:
                self._say_again_seconds = now + SETTLE_SECONDS
                LogEvent.CLOCK_SET.log(problem=problem)
            elif self.problem:
                return  # a calendar that wanders is told of once a minute
        self.problem = problem


def steady_clock(
    store: Store, clock: Callable[[], float], calendar: Callable[[], float]
) -> SteadyClock:
    """The clock of a process that serves ``store``: by the store's calendar where several machines
    share that one, else by this machine's. Says in the log where it lies before what this fleet
    has signed: devices recover from that, but one of the two times was wrong."""
    database = store.database
    steady = SteadyClock(clock, database.now if database.tells_time else calendar)
    last = store.facts.started_unix_seconds or 0
    if steady() < last - _SAID_SECONDS:
        LogEvent.CLOCK_BEHIND.log(now=moment_of(steady()), last=moment_of(last))
    return steady


def moment_of(unix_seconds: float) -> str:
    """A time for people."""
    try:
        moment = datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):  # a calendar that was set beyond the year 9999
        return f"second {int(unix_seconds)} of Unix time"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")
