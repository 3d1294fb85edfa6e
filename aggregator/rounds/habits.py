"""For how long a round waits for each device: by when the device's own updates come.

No other device's times count, so nobody is shut out for being slow, and nobody can have others shut
out: a round waits for an update for as long as updates of this device take. Whoever sent none in
the last rounds is not waited for; what comes all the same counts, as long as the round is open. An
update that comes too late for a round that ended early, and would have been in time for its
deadline, is waited for again from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from aggregator.store.habits import Habit
from aggregator.task.file import RoundSettings

_FADES = 0.75
"""What is left of a longest time with each update that comes sooner."""
_PATIENCE = 2
"""Rounds in a row that wait for a device in vain, before the next do not wait for it."""
_RAREST = 1 << 20
_UNKNOWN = Habit()


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


class KeepsHabits(Protocol):
    """See :class:`~aggregator.store.habits.Habits`."""

    def all(self) -> dict[bytes, Habit]: ...
    def put(self, found: Mapping[bytes, Habit]) -> None: ...
    def forget(self, device_ids: Iterable[bytes]) -> None: ...
    def when_kept(self, then: Callable[[], object]) -> None: ...


class KnownHabits:
    """Those of a task's devices, in memory; in the store as of the end of the last round."""

    def __init__(self, store: KeepsHabits) -> None:
        self._store = store
        self._of = store.all()
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
        found = {each: self.of(each) for each in self._changed} | silent
        self._store.put({each: habit for each, habit in found.items() if is_here(each)})
        self._store.forget(each for each in self._changed if not is_here(each))

        def kept() -> None:
            self._of.update(silent)
            self._changed.clear()

        self._store.when_kept(kept)

    def drop(self, device_id: bytes) -> None:
        """A device that was revoked."""
        if self._of.pop(device_id, None) is not None:
            self._changed.add(device_id)
