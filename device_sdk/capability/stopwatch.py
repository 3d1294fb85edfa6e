"""The timing loop: blocks of steady runs per k, cold starts apart, all inside one time box."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import numpy as np

from device_sdk.fields import Declared, Within
from device_sdk.system.clock import Clock, checked_slowdown, slowed

# What is asked, and what a capability measurement times.

WhenNoneFits = Literal["one", "decline"]


@dataclass(frozen=True)
class Request(Declared):
    """What is asked: the largest option for work that has to end within a deadline.

    An option fits when its p90 is at most `limit_seconds`, (1 - headroom) x the deadline.
    `time_box_seconds` bounds the whole measurement; `slowdown` emulates a device that many times
    slower. `max_k` and `when_none_fits` are for a choice of k.
    """

    deadline_seconds: Annotated[float, Within(0, above=True)]
    max_k: Annotated[int, Within(1)] = 64
    headroom: Annotated[float, Within(0, 1, below=True)] = 0.2
    time_box_seconds: Annotated[float, Within(0, above=True)] = 10.0
    slowdown: Annotated[float, Within(1)] = 1.0
    when_none_fits: WhenNoneFits = "one"

    @property
    def limit_seconds(self) -> float:
        """What an option's p90 may be."""
        return self.deadline_seconds * (1.0 - self.headroom)


class Workload(Protocol):
    """Work whose cost grows with the latent dimension k."""

    def prepare(self, k: int, share: float = 1.0) -> None:
        """Get ready to run at `k`; do only a `share` (0 to 1] of the work in each run."""

    def run(self) -> object:
        """Do the work once, at the k and share prepared last; what it returns is ignored."""


# A first impression runs this share of the work, so that a step longer than the whole time box is
# noticed before it is started: a running step cannot be interrupted.
_FIRST_SHARE = 1.0 / 64.0
_SHARE_STEP = 8.0
# A larger share is tried if, in proportion, it takes an eighth of the time left at most: for less
# than this step it would teach little.
_LEAST_STEP = 1.5
# Tries of a share, the first included, as long as they end within this share of the time box.
_TRIES = 5
_TRIES_SHARE = 1.0 / 3.0
# A clock may say that a run took no time.
_INSTANT = 1e-9
# What a start at a k not seen yet may cost above what smaller ks let expect.
_COLD_ALLOWANCE = 1.5
# Steady runs in a block: of slow ones, as a rule, and of those that take no time.
_FEWEST_RUNS, _USUAL_RUNS, _MOST_RUNS = 3, 8, 2000
# A linear system of k unknowns takes the cube of k.
_MOST_GROWTH = 3.0


@dataclass(frozen=True)
class Measurement:
    """What was seen at one k, in seconds.

    `cold_start_seconds` is getting ready plus the first run, which the other figures leave out.
    Without a steady run (the time box ended first) `median_seconds` and `p90_seconds` are None.
    `blocks` counts the visits, between which other ks were measured.
    """

    k: int
    cold_start_seconds: float
    median_seconds: float | None
    p90_seconds: float | None
    runs: int
    blocks: int


class Stopwatch:
    """Times a workload at one k after another and remembers every run.

    The request's time box begins at ``start``. A block ends early once two steady runs took twice
    as long as the request's limit. `progress` is told what is known about a k after each of its
    blocks.
    """

    def __init__(
        self,
        workload: Workload,
        request: Request,
        clock: Clock,
        *,
        start: float,
        progress: Callable[[Measurement], None] | None = None,
    ) -> None:
        self._workload = workload
        self._clock = clock
        self._stop_at = start + request.time_box_seconds
        self._give_up_seconds = request.limit_seconds
        # Blocks of which some forty fit into the time box, even of slow runs.
        self._least_seconds = min(0.1, request.time_box_seconds / 100.0)
        self._most_seconds = request.time_box_seconds / 40.0
        self._slowdown = checked_slowdown(request.slowdown)
        self._progress = progress
        self._cold: dict[int, float] = {}
        self._blocks: dict[int, list[list[float]]] = {}

    def seconds_left(self) -> float:
        """Seconds until the end of the time box."""
        return self._stop_at - self._clock.now()

    def first_impression(self) -> float:
        """An estimate, in seconds, of one run at k = 1, from a share of it; errs upwards.

        A small share's time is mostly what a run costs whatever its size, and a moment without the
        processor is scaled up with it. So while the estimate fills the time box, the share is tried
        again, the quickest try counts, and then larger shares are tried as far as they surely fit.
        """
        try_until = self._stop_at - (1.0 - _TRIES_SHARE) * self.seconds_left()
        share = _FIRST_SHARE
        while True:
            self._workload.prepare(1, share)
            self._run()
            if self.seconds_left() <= 0.0:
                return float("inf")
            seconds = self._quickest(share, try_until)
            step = min(_SHARE_STEP, self.seconds_left() / (8.0 * max(seconds, _INSTANT)))
            if share == 1.0 or self._two_fit(seconds / share) or step < _LEAST_STEP:
                return seconds / share
            share = min(1.0, step * share)

    def _quickest(self, share: float, try_until: float) -> float:
        """Seconds of the quickest of a few steady runs of the share; of one where that will do."""
        seconds = self._run()
        for _ in range(_TRIES - 1):
            over = self._clock.now() + seconds > try_until
            if over or self._two_fit(seconds / share):
                break
            seconds = min(seconds, self._run())
        return seconds

    def _two_fit(self, estimate: float) -> bool:
        """Whether two runs, a cold and a steady one, fit the time left."""
        return 2.0 * estimate <= self.seconds_left()

    def measure(self, k: int) -> bool:
        """Add a block of steady runs at `k`; False where the time left has no room for one."""
        if self._expected_seconds(k) > self.seconds_left():
            return False
        start = self._clock.now()
        self._workload.prepare(k)
        preparing = self._clock.now() - start
        first = self._run()
        self._cold.setdefault(k, preparing + first)
        runs = self._steady_runs(first)
        if runs:
            self._blocks.setdefault(k, []).append(runs)
        if self._progress is not None:
            self._progress(self._measurement(k))
        return bool(runs)

    def _run(self) -> float:
        start = self._clock.now()
        self._workload.run()
        return slowed(self._clock, start, self._slowdown, self._stop_at)

    def _steady_runs(self, first: float) -> list[float]:
        runs: list[float] = []
        longest, total = first, 0.0
        # A short first run is cold in other ways than its own allocations: caches, clock rate.
        if first < self._least_seconds and self.seconds_left() > first:
            self._run()
        while not self._block_done(len(runs), total) and self.seconds_left() >= longest:
            if len(runs) >= 2 and min(runs) > 2.0 * self._give_up_seconds:
                break
            runs.append(self._run())
            longest = runs[-1]
            total += longest
        return runs

    def _block_done(self, runs: int, seconds: float) -> bool:
        """Whether a block of so many runs and seconds is complete; of slow runs, fewer will do."""
        if runs >= _MOST_RUNS or (runs >= _FEWEST_RUNS and seconds >= self._most_seconds):
            return True
        return runs >= _USUAL_RUNS and seconds >= self._least_seconds

    def _expected_seconds(self, k: int) -> float:
        """A cautious estimate of the shortest block at `k`: getting ready and two runs."""
        if k in self._blocks:
            return self._cold[k] + self.p90(k)
        growth = self._growth(k)
        expected = [
            (_COLD_ALLOWANCE * self._cold[seen] + self.p90(seen)) * max(1.0, k / seen) ** growth
            for seen in self._blocks
        ]
        return min(expected, default=0.0)

    def _growth(self, k: int) -> float:
        """The power of k with which costs rise up to it: at most one above that seen so far.

        What a run costs whatever k is, hides at small ks what rises with its square or cube.
        """
        seen = sorted(each for each in self._blocks if each < k)[-2:]
        if len(seen) < 2:
            return 1.0
        before, last = (max(self._median(each), _INSTANT) for each in seen)
        power = math.log(last / before) / math.log(seen[1] / seen[0])
        return min(1.0 + max(0.0, power), _MOST_GROWTH)

    @property
    def runs(self) -> Mapping[int, Sequence[Sequence[float]]]:
        """Per k with steady runs, its blocks; durations in seconds."""
        return self._blocks

    def blocks(self, k: int) -> int:
        """Number of blocks at `k`."""
        return len(self._blocks.get(k, ()))

    def p90(self, k: int) -> float:
        """The 90th percentile of all steady runs at `k`, in seconds. Raises KeyError for none."""
        return float(np.quantile(np.concatenate(self._blocks[k]), 0.9))

    def _median(self, k: int) -> float:
        return float(np.median(np.concatenate(self._blocks[k])))

    def measurements(self) -> tuple[Measurement, ...]:
        """One entry per k that was started, rising in k."""
        return tuple(self._measurement(k) for k in sorted(self._cold))

    def _measurement(self, k: int) -> Measurement:
        runs = sum(map(len, self._blocks.get(k, ())))
        return Measurement(
            k=k,
            cold_start_seconds=self._cold[k],
            median_seconds=self._median(k) if runs else None,
            p90_seconds=self.p90(k) if runs else None,
            runs=runs,
            blocks=self.blocks(k),
        )
