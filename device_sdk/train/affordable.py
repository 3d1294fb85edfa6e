"""Which of a task's artifacts a device can afford: the largest whose round ends in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from device_sdk.system.clock import Clock

_HEADROOM = 0.2
_MOST_RUNS = 8
# Steps that an unfinished run must have made before its pace says anything.
_FEWEST_STEPS = 3
# How much longer it is run where it made fewer.
_LONGER = 3.0


@dataclass(frozen=True, slots=True)
class WorkDone:
    """One run of a round's work: how long, how many train steps, and whether it was cut short."""

    seconds: float
    steps: int
    finished: bool


class RoundWork(Protocol):
    """A round's training with one artifact, on a state that is thrown away."""

    name: str

    def run(self, most_seconds: float) -> WorkDone:
        """Train one round; cut short between two steps after ``most_seconds``."""


@dataclass(frozen=True, slots=True)
class ArtifactChoice:
    """``place``: of the chosen artifact; None where even the smallest misses.

    ``p90_seconds``: of its measured rounds; an estimate from the pace of its steps where a whole
    round did not fit the time box.
    """

    place: int | None
    p90_seconds: float | None
    reason: str


def choose_artifact(
    works: Sequence[RoundWork],
    *,
    train_seconds: float,
    box_seconds: float,
    slowdown: float,
    clock: Clock,
) -> ArtifactChoice:
    """The largest artifact whose round takes at most 80 % of ``train_seconds`` at p90.

    ``works``: smallest artifact first. Each larger one is measured only where the one before fits.
    ``box_seconds``: what measuring may take; the smallest artifact's first round is finished all
    the same, unless it misses. ``slowdown``: emulates a device that many times slower.
    """
    limit = (1.0 - _HEADROOM) * train_seconds / slowdown
    start = clock.now()
    whole_steps = 0
    fits: list[tuple[int, float]] = []
    missed = ""
    for place, work in enumerate(works):
        share = max(0.0, start + box_seconds - clock.now()) / (len(works) - place)
        seconds, whole_steps = _measure(work, limit, share, whole_steps, clock)
        shown = f"{work.name} takes {_shown(seconds * slowdown)}"
        if seconds > limit:
            missed = shown if np.isfinite(seconds) else f"{work.name} did not end in time"
            break
        fits.append((place, seconds * slowdown))
    bound = f"the limit is {_shown(limit * slowdown)} (80% of {_shown(train_seconds)})"
    if not fits:
        return ArtifactChoice(None, None, f"Even the smallest misses: {missed}; {bound}.")
    place, p90 = fits[-1]
    why = f"{works[place].name} takes {_shown(p90)} at p90, {bound}"
    why += f"; {missed}." if missed else "; it is the largest one."
    return ArtifactChoice(place, p90, why)


def _measure(
    work: RoundWork, limit: float, share: float, whole_steps: int, clock: Clock
) -> tuple[float, int]:
    """p90 of a round in seconds (infinite: not finished by the limit), and a round's steps."""
    until = clock.now() + share
    # The artifact before says how many steps a round has: then a part of a round is enough.
    most = min(limit, max(share, limit / 16)) if whole_steps else limit
    first = work.run(most)
    while not first.finished:
        if whole_steps and first.steps >= _FEWEST_STEPS:
            return first.seconds * whole_steps / first.steps, whole_steps
        if most >= limit:
            return float("inf"), whole_steps
        most = min(limit, _LONGER * most)
        first = work.run(most)
    runs: list[float] = []
    # The first run was cold; what follows counts, as far as there is time.
    while len(runs) < _MOST_RUNS and clock.now() + first.seconds <= until:
        again = work.run(limit)
        if not again.finished:
            return float("inf"), whole_steps
        runs.append(again.seconds)
    return float(np.quantile(runs or [first.seconds], 0.9)), first.steps


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"
