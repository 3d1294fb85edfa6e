"""Whose training is next: one at a time, by deadlines, and nobody left out for ever."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
