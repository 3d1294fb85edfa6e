"""A clock that moves by being looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepClock:
    """Each look at the clock takes ``tick`` seconds."""

    tick: float = 1e-4
    seconds: float = 0.0

    def now(self) -> float:
        self.seconds += self.tick
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
