"""What taking part may cost this device in a day, over all tasks and restarts."""

from __future__ import annotations

import math

from device_sdk.methods.learner import Declined
from device_sdk.rounds.session import AggregatorTime
from device_sdk.world import DeviceWorld

_DAY_SECONDS = 86_400
_LEAST_SECONDS = _DAY_SECONDS / 2
"""A day of this device lasts at least so long: midnights lie further apart."""
_CORRECTED_SECONDS = 3600.0


class OverBudget(Declined):
    """A round would take more than is left of the day's seconds or bytes."""


class DayBudget:
    """Seconds of training, and bytes sent and received, by the day (UTC) of the aggregator's time.

    Of a training its expected length is on the disk before it begins, and what it took after: a
    process that dies in it has spent it all the same. Bytes reach the disk with :meth:`save`.

    That time may jump, and a day that was spent is not to be had again by it. Where it goes back,
    the day before goes on under an earlier number. Where it goes ahead, another day begins, but
    none within half a day of the last one that this process saw begin, by its own clock. So no 24
    hours cost more than three days' worth, and one more for each restart, however the aggregator's
    clock goes to and fro; and whatever it said, a new day comes half a day after it is right.
    """

    def __init__(self, world: DeviceWorld, time: AggregatorTime) -> None:
        self._store, self._options, self._time = world.home.spent, world.options, time
        self._work_clock, self._clock = world.work_clock, world.clock
        self._began_seconds = -math.inf
        self._bytes = 0
        self._set_aside = (0.0, 0.0)

    def count(self, bytes_: int) -> None:
        """So many bytes were sent, or came."""
        self._bytes += bytes_

    def save(self) -> None:
        """What was counted is on the disk when this returns."""
        if self._bytes:
            self._turn()
            self._add(0.0)

    def require(self, *, seconds: float = 0.0, bytes_: int = 0) -> None:
        """Raises :class:`OverBudget` where so much more is more than is left of today, and where no
        seconds are left."""
        options = self._options
        if options.seconds_a_day is None and options.bytes_a_day is None:
            return
        self._turn()
        spent = self._store.so_far()
        most = options.seconds_a_day
        if most is not None and (spent.seconds >= most or spent.seconds + seconds > most):
            takes = f", and this round's would take about {seconds:.1f} s" if seconds else ""
            raise OverBudget(
                f"{spent.seconds:.1f} s of this day's {most:g} s of training are spent{takes} "
                "(TrainingOptions.seconds_a_day)"
            )
        spent_bytes, most_bytes = spent.bytes + self._bytes, options.bytes_a_day
        if most_bytes is not None and spent_bytes + bytes_ > most_bytes:
            raise OverBudget(
                f"{spent_bytes:,} of this day's {most_bytes:,} bytes are spent, and this round "
                f"takes {bytes_:,} or more (TrainingOptions.bytes_a_day)"
            )

    def set_aside(self, seconds: float) -> None:
        """A training begins that is expected to take so long. Raises ``sqlite3.Error``."""
        self._set_aside = (seconds, self._work_clock.now())
        self._turn()
        self._add(seconds)

    def settle(self) -> None:
        """It has ended: what it took is spent, in the place of what was set aside."""
        seconds, began = self._set_aside
        self._add(self._work_clock.now() - began - seconds)

    def _add(self, seconds: float) -> None:
        self._store.add(seconds, self._bytes)
        self._bytes = 0

    def _turn(self) -> None:
        """Begin another day where one has come."""
        day, unix_seconds = self._store.day(), self._time.unix_seconds()
        today = unix_seconds // _DAY_SECONDS
        if day is None:
            self._store.begin(today)
        elif self._time.now() is None:
            return  # what was signed last may be of days ago
        elif today > day and self._clock() >= self._began_seconds + _LEAST_SECONDS:
            self._store.begin(today)
            self._began_seconds = self._clock()
        elif unix_seconds < day * _DAY_SECONDS - _CORRECTED_SECONDS:
            self._store.rename(today)
