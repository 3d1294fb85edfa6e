"""What taking part may cost this device in a day, over all tasks and restarts."""

from __future__ import annotations

from device_sdk.methods.learner import Declined
from device_sdk.rounds.session import AggregatorTime
from device_sdk.world import DeviceWorld

_DAY_SECONDS = 86_400


class OverBudget(Declined):
    """A round would take more than is left of the day's seconds or bytes."""


class DayBudget:
    """Seconds of training, and bytes sent and received, by the day (UTC) of the aggregator's time.

    Of a training its expected length is on the disk before it begins, and what it took after: a
    process that dies in it has spent it all the same. Bytes reach the disk with :meth:`save`.
    """

    def __init__(self, world: DeviceWorld, time: AggregatorTime) -> None:
        self._store, self._options, self._time = world.home.spent, world.options, time
        self._clock = world.work_clock
        self._bytes = 0
        self._set_aside = (0, 0.0, 0.0)

    def count(self, bytes_: int) -> None:
        """So many bytes were sent, or came."""
        self._bytes += bytes_

    def save(self) -> None:
        """What was counted is on the disk when this returns."""
        if self._bytes:
            self._store.add(self._day(), 0.0, self._bytes)
            self._bytes = 0

    def require(self, *, seconds: float = 0.0, bytes_: int = 0) -> None:
        """Raises :class:`OverBudget` where so much more is more than is left of today, and where no
        seconds are left."""
        options = self._options
        if options.seconds_a_day is None and options.bytes_a_day is None:
            return
        spent = self._store.on(self._day())
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
        self._set_aside = (self._day(), seconds, self._clock.now())
        self._store.add(self._set_aside[0], seconds, self._bytes)
        self._bytes = 0

    def settle(self) -> None:
        """It has ended: what it took is spent, in the place of what was set aside."""
        day, seconds, began = self._set_aside
        self._store.add(day, self._clock.now() - began - seconds, self._bytes)
        self._bytes = 0

    def _day(self) -> int:
        return self._time.unix_seconds() // _DAY_SECONDS
