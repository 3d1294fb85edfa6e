"""Who was selected for a round and not heard of yet, whom it waits for, and when updates came."""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Sequence, Set

import numpy as np

from aggregator.store import TaskStore
from aggregator.store.reports import Habits
from aggregator.store.rows import Habit, RoundRow
from aggregator.task.file import RoundSettings

_MOST_KEPT = 256


# How long ago rounds opened, by the monotonic clock.


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


_FADES = 0.75
"""What is left of a longest time with each update that comes sooner."""
_PATIENCE = 2
"""Rounds in a row that wait for a device in vain, before the next do not wait for it."""
_RAREST = 1 << 20
_UNKNOWN = Habit()


# For how long a round waits for each device: by when the device's own updates come.
#
# No other device's times count, so nobody is shut out for being slow, and nobody can have others
# shut out: a round waits for an update for as long as updates of this device take. Whoever sent
# none in the last rounds is not waited for; what comes all the same counts, as long as the round is
# open. An update that comes too late for a round that ended early, and would have been in time for
# its deadline, is waited for again from then on.


def with_update(habit: Habit, seconds: float) -> Habit:
    """An update of the device came ``seconds`` after the opening of a round that it counted in, or
    would have counted in if the round had not ended early."""
    longest = 0.0 if habit.seconds is None else habit.seconds
    if not _FADES * longest <= seconds <= longest:
        longest = max(seconds, _FADES * longest)
    return Habit(longest)


def without_update(habit: Habit, *, lives: bool) -> Habit:
    """A round waited for the device in vain: it said so itself (``lives``), or nothing.

    Of a device of which no update ever came one silence is enough.
    """
    missed = habit.missed + max(1, habit.missed)
    if habit.seconds is None and not lives:
        missed = max(missed, _PATIENCE)
    return Habit(habit.seconds, min(missed, _RAREST), lives)


def is_waited_for(habit: Habit, round_number: int) -> bool:
    """Whether a round waits for the device.

    One that lives and sends no update may be too slow for rounds that others end: every second
    round waits for it, then every fourth, every eighth, so that all such devices are waited for in
    the same rounds.
    """
    if habit.missed < _PATIENCE:
        return True
    return habit.lives and round_number % habit.missed == 0


class KnownHabits:
    """Those of a task's devices, in memory; in the store, where there is one, as of the end of the
    last round."""

    def __init__(self, store: Habits | None) -> None:
        self._store = store
        self._of = {} if store is None else store.all()
        self._changed: set[bytes] = set()

    def of(self, device_id: bytes) -> Habit:
        return self._of.get(device_id, _UNKNOWN)

    def is_likely(self, device_id: bytes) -> bool:
        """Whether an update of the device is to be expected, whatever the round."""
        return self.of(device_id).missed < _PATIENCE

    def wait_seconds(
        self, device_id: bytes, round_number: int, settings: RoundSettings, most_seconds: float
    ) -> float:
        """How long after its opening a round waits for the device, or after the device has become
        free for it; ``most_seconds``: the round's length. 0: not at all."""
        habit = self.of(device_id)
        if not is_waited_for(habit, round_number):
            return 0.0
        if habit.seconds is None:
            return most_seconds
        usual = max(settings.least_deadline_seconds, settings.deadline_margin * habit.seconds)
        return min(most_seconds, usual)

    def heard(
        self, device_id: bytes, seconds: float | None, round_number: int | None = None
    ) -> None:
        """The device had its verdict in a round, or came late for one (``round_number`` None):
        ``seconds`` after the round's opening with an update, or with none."""
        before = self.of(device_id)
        if seconds is not None:
            found = with_update(before, seconds)
        elif round_number is not None and is_waited_for(before, round_number):
            found = without_update(before, lives=True)
        else:
            found = before._replace(lives=True)
        if found != before:
            self._of[device_id] = found
            self._changed.add(device_id)

    def save(self, in_vain: Collection[bytes], is_here: Callable[[bytes], object]) -> None:
        """Write down what changed since the last time, and whom a round waited for ``in_vain``;
        inside the transaction that closes it. ``is_here``: whether a device was not revoked."""
        silent = {each: without_update(self.of(each), lives=False) for each in in_vain}

        def kept() -> None:
            self._of.update(silent)
            self._changed.clear()

        if self._store is None:
            kept()
            return
        found = {each: self.of(each) for each in self._changed} | silent
        self._store.put({each: habit for each, habit in found.items() if is_here(each)})
        self._store.forget(each for each in self._changed if not is_here(each))
        self._store.when_kept(kept)

    def drop(self, device_id: bytes) -> None:
        """A device that was revoked."""
        if self._of.pop(device_id, None) is not None:
            self._changed.add(device_id)


class Attendance:
    """Of the current round, as this process hears of devices."""

    def __init__(
        self,
        habits: KnownHabits,
        settings: RoundSettings,
        seen: Callable[[Sequence[bytes]], set[bytes]] = set,
    ) -> None:
        """``seen``: those of devices that ever opened a session."""
        self.habits, self._settings, self._seen = habits, settings, seen
        self._round, self._length_seconds = 0, 0.0
        self._missing: set[bytes] = set()
        # Seconds after the opening up to which each is waited for; some have been heard since.
        self._waits: list[tuple[float, bytes]] = []
        self._unseen: list[bytes] = []
        self._any_heard = False
        self._arrivals = array("d")

    def likely(self, device_ids: Iterable[bytes]) -> set[bytes]:
        """Those of devices of which an update is to be expected: they sent some of late, or opened
        a session and did not stay away since."""
        found = set(filter(self.habits.is_likely, device_ids))
        unknown = [each for each in found if self.habits.of(each).seconds is None]
        return found - set(unknown) | self._seen(unknown)

    def begin(self, number: int, length_seconds: float, selected: set[bytes]) -> None:
        """A round opens, for no longer than that."""
        self._round, self._length_seconds = number, length_seconds
        self._missing, self._any_heard, self._arrivals = selected, False, array("d")
        waits = {each: wait for each in selected if (wait := self._wait_seconds(each)) > 0}
        unknown = [each for each in waits if self.habits.of(each).seconds is None]
        self._unseen = sorted(set(unknown) - self._seen(unknown))
        # Enrolled, and not started since: it has the time that sessions take to open.
        waits |= dict.fromkeys(self._unseen, self._grace_seconds)
        self._waits = sorted((wait, each) for each, wait in waits.items())

    def end(self) -> None:
        """No round is open any more."""
        self._missing, self._waits = set(), []

    def resume(self, store: TaskStore, row: RoundRow, selected: set[bytes]) -> None:
        """The round was open when the process started."""
        # Whom it waits for, and for how long, was decided before any of them was heard.
        self.begin(row.round, row.length_seconds, selected)
        for device_id, seconds in store.log.came(row.generation, row.round):
            self.heard_of(device_id, seconds)

    def awaits_any(
        self,
        device_ids: Iterable[bytes],
        number: int,
        length_seconds: float,
        elapsed_seconds: float,
    ) -> bool:
        """Whether one of these devices, which a round had selected, were still waited for if the
        round had not ended early; ``length_seconds``: of its deadline, ``elapsed_seconds``: since
        its opening."""
        habits, settings = self.habits, self._settings
        waited = [
            each
            for each in device_ids
            if habits.wait_seconds(each, number, settings, length_seconds) > elapsed_seconds
        ]
        unknown = [each for each in waited if habits.of(each).seconds is None]
        unseen = set(unknown) - self._seen(unknown)
        return len(waited) > len(unseen) or (
            bool(unseen) and elapsed_seconds < min(length_seconds, settings.resume_grace_seconds)
        )

    def look(self, row: RoundRow, elapsed_seconds: float) -> None:
        """Called before what follows is asked for."""
        if self._unseen and elapsed_seconds >= self._grace_seconds:
            here = self._seen(self._unseen)
            self._unseen = []
            self._waits = sorted(
                (self._length_seconds if each in here else wait, each) for wait, each in self._waits
            )

    @property
    def _grace_seconds(self) -> float:
        return min(self._length_seconds, self._settings.resume_grace_seconds)

    def look_at_all(self, row: RoundRow) -> None:
        """Called when the round closes. Here: nothing, likewise."""

    @property
    def counted(self) -> int:
        """Updates."""
        return len(self._arrivals)

    @property
    def outstanding(self) -> int:
        """Devices that were not heard of."""
        return len(self._missing)

    @property
    def any_heard(self) -> bool:
        return self._any_heard

    @property
    def missing(self) -> Set[bytes]:
        return self._missing

    def waited_for(self, elapsed_seconds: float) -> list[bytes]:
        """Whom the round waits for at this time after its opening, the shortest wait first."""
        after = bisect_right(self._waits, elapsed_seconds, key=lambda each: each[0])
        return [each for _, each in self._waits[after:] if each in self._missing]

    def in_vain(self, elapsed_seconds: float) -> list[bytes]:
        """Whom it has waited for, and does not any more."""
        before = bisect_right(self._waits, elapsed_seconds, key=lambda each: each[0])
        return [each for _, each in self._waits[:before] if each in self._missing]

    def closes_seconds(self, elapsed_seconds: float, has_quorum: Callable[[], bool]) -> float:
        """After its opening, when the round closes if nothing more is heard than so far.

        With a quorum: as soon as it waits for nobody. Of those that it waits for, each has its own
        time. Where that is over, and some are missing, something may have slowed down all of them:
        it waits for as long as if they were like the median of those that came.
        """
        most = self._length_seconds
        longest = self._longest_wait_seconds()
        wait = max(longest, self._settings.least_deadline_seconds)
        if not self.counted or wait >= most or not has_quorum():
            return most
        if longest and wait <= elapsed_seconds:
            wait = max(wait, self._settings.deadline_margin * self._median_seconds())
        return min(most, wait)

    def _longest_wait_seconds(self) -> float:
        """Of devices that were not heard of; 0: it waits for none."""
        while self._waits and self._waits[-1][1] not in self._missing:
            self._waits.pop()
        return self._waits[-1][0] if self._waits else 0.0

    def _median_seconds(self) -> float:
        """After the round opened, of the updates counted, of which there are some."""
        return float(np.median(self._arrivals))

    def heard_of(self, device_id: bytes, counted_seconds: float | None = None) -> None:
        """A device had its verdict; ``counted_seconds`` after the opening if it was counted."""
        self._missing.discard(device_id)
        self._any_heard = True
        self.habits.heard(device_id, counted_seconds, self._round)
        if counted_seconds is not None:
            self._arrivals.append(counted_seconds)

    def came_late(self, device_id: bytes, seconds: float | None, elapsed_seconds: float) -> None:
        """For a round before, ``seconds`` after its opening with an update that its deadline had
        let in, or with none. From now on the device is at the current one, if any."""
        self.habits.heard(device_id, seconds)
        if device_id in self._missing and (wait := self._wait_seconds(device_id)) > 0:
            insort(self._waits, (min(self._length_seconds, elapsed_seconds + wait), device_id))

    def drop(self, device_id: bytes) -> None:
        """A device that will not be heard of."""
        self._missing.discard(device_id)
        self.habits.drop(device_id)

    def keep(self, selected: set[bytes]) -> None:
        """The others are not waited for any more."""
        self._missing &= selected

    def _wait_seconds(self, device_id: bytes) -> float:
        return self.habits.wait_seconds(
            device_id, self._round, self._settings, self._length_seconds
        )


class CommittedAttendance(Attendance):
    """Of the current round, as others commit it to the store.

    Their counts tell when to look at who it was: verdicts are read when, by the counts, nobody that
    the round waits for is missing, and not before.
    """

    def __init__(self, store: TaskStore, settings: RoundSettings) -> None:
        super().__init__(KnownHabits(store.habits), settings, store.fleet.devices.seen_among)
        self._store = store
        self._generation = 0
        self._counted = 0
        self._heard = 0
        self._looked_at = 0  # of these, those that are known by now
        self._median = (0, 0.0)  # of so many updates that were counted
        # How many were heard of, and who of these was asked for last.
        self._looked: tuple[int, list[bytes]] = (0, [])

    def begin(self, number: int, length_seconds: float, selected: set[bytes]) -> None:
        super().begin(number, length_seconds, selected)
        self._counted = self._heard = self._looked_at = 0
        self._looked, self._median = (0, []), (0, 0.0)

    def resume(self, store: TaskStore, row: RoundRow, selected: set[bytes]) -> None:
        counts = store.shares.counts(row.round)
        super().resume(store, row, selected)
        self._counted, self._heard = counts
        self._looked_at = self._heard

    def look(self, row: RoundRow, elapsed_seconds: float) -> None:
        super().look(row, elapsed_seconds)
        for device_id, seconds in self._store.late.take().items():
            self.came_late(device_id, seconds, elapsed_seconds)
        self._generation = row.generation
        self._counted, self._heard = self._store.shares.counts(row.round)
        self._any_heard = self._any_heard or self._heard > 0
        while self._heard > self._looked_at:
            # Fewer are waited for as time goes by, though nobody else is heard.
            matter = self.waited_for(elapsed_seconds) or self.in_vain(elapsed_seconds)
            asked = self._heard, matter or sorted(self._missing)
            if self._heard - self._looked_at < len(asked[1]) or asked == self._looked:
                return
            self._looked = asked
            self._take(self._store.log.came(row.generation, row.round, asked[1]))

    def look_at_all(self, row: RoundRow) -> None:
        self._counted, self._heard = self._store.shares.counts(row.round)
        self._take(self._store.log.came(row.generation, row.round))
        self._looked_at = self._heard

    def _take(self, came: Iterable[tuple[bytes, float | None]]) -> None:
        for device_id, seconds in came:
            if device_id in self._missing:
                self._missing.remove(device_id)
                self._looked_at += 1
                self.habits.heard(device_id, seconds, self._round)

    @property
    def counted(self) -> int:
        return self._counted

    @property
    def outstanding(self) -> int:
        return max(0, len(self._missing) - (self._heard - self._looked_at))

    def _median_seconds(self) -> float:
        if self._median[0] != self._counted:
            self._median = (
                self._counted,
                self._store.log.median_seconds(self._generation, self._round),
            )
        return self._median[1]


def asked_share(settings: RoundSettings, likely: int) -> float:
    """Of the devices, the share that a round selects: with ``wanted``, so many times as many of
    those that are ``likely`` to send an update as :attr:`RoundSettings.over_select` says."""
    if not settings.wanted:
        return settings.share
    return min(settings.share, settings.wanted * settings.over_select / max(1, likely))
