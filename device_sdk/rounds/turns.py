"""Whose training is next: one at a time, by deadlines, and nobody left out for ever."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from device_sdk.methods.learner import Declined
from device_sdk.rounds.session import AggregatorTime
from device_sdk.world import DeviceWorld

_MARGIN = 1.25
"""A training that is put off as long as possible still has so many times what it took last."""
_MOST_DOUBLINGS = 10
_HEARD_SECONDS = 2.0
"""A message that comes so soon after a training may have waited for its end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A round that only has to be trained. ``deadline_seconds`` by the clock of ``pick``.

    ``seconds``: what its training is expected to take. ``since_seconds``: when it became ready.
    """

    task: str
    deadline_seconds: float
    seconds: float
    since_seconds: float = math.inf

    def fits(self, now: float) -> bool:
        """Whether it would end in time."""
        return now + self.seconds <= self.deadline_seconds

    def waited_too_long(self, now: float) -> bool:
        """Whether it would have ended in time, had it not waited."""
        return not self.fits(now) and self.fits(self.since_seconds)

    @property
    def latest_seconds(self) -> float:
        """Until when it may be put off."""
        return self.deadline_seconds - _MARGIN * self.seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """``task`` begins now, or ends without a training, for the reason that ``gives_up`` says;
    None: nobody until ``at_seconds``."""

    task: str | None = None
    gives_up: str = ""
    at_seconds: float = math.inf


class Turns:
    """Earliest deadline first (Jackson 1955), among the rounds that still end in time.

    A training is not interrupted, so a task's whole round can pass during another's, again and
    again where both come in step. A task that lost a round in this way goes before the others in
    its next one; and since that may come during a training too, the others' trainings are then put
    off as long as they can be. From the second loss in a row on, the others give up rounds for it:
    twice as many with each loss, so that the device is idle when its round comes at last.
    """

    def __init__(self) -> None:
        self._lost: dict[str, int] = {}
        self._patience: dict[str, int] = {}
        self._last = ("", math.inf, -math.inf)

    def pick(self, ready: Sequence[Ready], now: float, taking_part: Collection[str]) -> Turn:
        """Whose turn it is. ``taking_part``: all tasks of which rounds may come."""
        if not ready:
            return Turn()
        for each in ready:
            if each.waited_too_long(now) and self._was_busy_for_others(each):
                self.lose(each.task)
                return Turn(each.task, "too late for it when another task's training had ended")
        fitting = [each for each in ready if each.fits(now)] or ready
        most = max(self._lost.get(each.task, 0) for each in fitting)
        owed = [each for each in fitting if self._lost.get(each.task, 0) == most]
        awaited = self._awaited({each.task for each in ready}, taking_part, most)
        if not awaited:
            return Turn(min(owed, key=lambda each: (each.deadline_seconds, each.task)).task)
        first = min(fitting, key=lambda each: each.latest_seconds)
        if now < first.latest_seconds:
            return Turn(at_seconds=first.latest_seconds)
        self._patience[awaited] -= 1
        if self._lost[awaited] < 2:
            return Turn(first.task)
        self.lose(first.task)  # or it would be the one that is left out
        return Turn(first.task, f"gave way to the task {awaited!r}, which had no turn for too long")

    def began(self, task: str, now: float) -> None:
        """Its training has begun."""
        self._last = (task, now, math.inf)

    def ended(self, task: str, now: float) -> None:
        """Its training has ended, well or not: nothing is owed to it any more."""
        if self._last[0] == task:
            self._last = (*self._last[:2], now)
        self._lost.pop(task, None)
        self._patience.pop(task, None)

    def missed(self, task: str, deadline_seconds: float) -> bool:
        """A round's deadline passed before its training began; whether that was for another's."""
        other, began, ended = self._last
        if other in ("", task) or not began <= deadline_seconds <= ended:
            return False
        self.lose(task)
        return True

    def lose(self, task: str) -> None:
        """A round of the task was lost to others."""
        self._lost[task] = self._lost.get(task, 0) + 1
        self._patience[task] = 1 << min(self._lost[task], _MOST_DOUBLINGS)

    def waited_since(self, task: str, now: float) -> float:
        """Since when a round waits that was heard of now: messages wait while a device trains."""
        other, began, ended = self._last
        just_ended = other not in ("", task) and ended >= now - _HEARD_SECONDS
        return began if just_ended else math.inf

    def _was_busy_for_others(self, round_: Ready) -> bool:
        other, _, ended = self._last
        return other not in ("", round_.task) and ended > round_.since_seconds

    def _awaited(self, ready: Collection[str], taking_part: Collection[str], lost: int) -> str:
        """The task that lost more than ``lost`` and that the others wait for; empty for none."""
        found = [
            name
            for name, left in self._patience.items()
            if left > 0 and self._lost[name] > lost and name not in ready and name in taking_part
        ]
        return max(found, key=lambda name: self._lost[name], default="")


# What taking part may cost this device in a day, over all tasks and restarts.

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
