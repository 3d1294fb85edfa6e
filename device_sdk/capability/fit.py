"""Which is the largest option that fits into so many seconds? Asked smallest first.

Options are a number of columns k, from 1 up, whose cost grows with it (`choose_k`), or a few works
that can be cut short (`choose_among`). Whatever they are, one fits when the 90th percentile of its
time keeps the limit, and a larger one is begun only where a smaller one was seen to fit: a train
step that runs cannot be stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from device_sdk.capability.machine import Machine
from device_sdk.capability.stopwatch import Measurement, Request, Stopwatch, Workload
from device_sdk.system.clock import Clock

_INSTANT = 1e-9


def _shown(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


# The largest of a few works, each of which can be cut short: artifacts of unequal size.

_MOST_RUNS = 8
# Steps that an unfinished run must have made before its pace says anything.
_FEWEST_STEPS = 3
# How much longer it is run where it made fewer.
_LONGER = 3.0


@dataclass(frozen=True, slots=True)
class WorkDone:
    """One run of a work: how long, how many train steps, and whether it was cut short."""

    seconds: float
    steps: int
    finished: bool


class StoppableWork(Protocol):
    """A round's training with one artifact, say, on a state that is thrown away.

    ``size``: how many numbers it trains, say; costs between two sizes lie on a line.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> float: ...

    def run(self, most_seconds: float) -> WorkDone:
        """Do it once, at least one step of it; cut short between two steps after
        `most_seconds`."""


@dataclass(frozen=True, slots=True)
class Fit:
    """`place`: of the chosen work; None where even the smallest misses.

    `p90_seconds`: of its measured runs; an estimate from the pace of its steps where a whole run
    did not fit the time box. `measured`: places, in the order in which they were measured.
    """

    place: int | None
    p90_seconds: float | None
    reason: str
    measured: tuple[int, ...] = ()


def choose_among(works: Sequence[StoppableWork], request: Request, clock: Clock) -> Fit:
    """The largest of the `works`, which come smallest first, that fits.

    The two smallest are measured first. A line through what was measured then says which is likely
    the largest that fits, and where it is wrong it is drawn anew. The smallest one's first run is
    finished even past the time box, unless it misses.
    """
    limit = request.limit_seconds / request.slowdown
    stop_at = clock.now() + request.time_box_seconds
    took: dict[int, float] = {}
    low, high, whole_steps = -1, len(works), 0
    while high - low > 1:
        place = _likely_place([work.size for work in works], took, low, high, limit)
        share = max(0.0, stop_at - clock.now()) / (high - low - 1)
        took[place], whole_steps = _p90_of(works[place], limit, share, whole_steps, clock)
        low, high = (place, high) if took[place] <= limit else (low, place)
    bound = (
        f"the limit is {_shown(request.limit_seconds)} "
        f"({1.0 - request.headroom:.0%} of {_shown(request.deadline_seconds)})"
    )

    def shown(place: int) -> str:
        if not math.isfinite(took[place]):
            return f"{works[place].name} did not end in time"
        return f"{works[place].name} takes {_shown(took[place] * request.slowdown)}"

    measured = tuple(took)
    if low < 0:
        why = f"Even the smallest misses: {shown(0)}; {bound}."
        return Fit(None, None, why, measured)
    then = shown(high) if high < len(works) else "it is the largest one"
    why = f"{shown(low)} at p90, {bound}; {then}."
    return Fit(low, took[low] * request.slowdown, why, measured)


def _likely_place(
    sizes: Sequence[float], took: Mapping[int, float], low: int, high: int, limit: float
) -> int:
    """Of the places between low and high, the largest that is likely to fit; the least where none
    is, or where less than two were measured."""
    known = [place for place in took if math.isfinite(took[place])]
    if len(known) < 2:
        return low + 1
    size = np.array([sizes[place] for place in known])
    seconds = np.array([took[place] for place in known])
    apart = size - size.mean()
    slope = float(apart @ seconds / max(apart @ apart, _INSTANT))
    likely = seconds.mean() + slope * (np.array(sizes) - size.mean())
    return max((each for each in range(low + 1, high) if likely[each] <= limit), default=low + 1)


def _p90_of(
    work: StoppableWork, limit: float, share: float, whole_steps: int, clock: Clock
) -> tuple[float, int]:
    """p90 of a run in seconds (infinite: not finished by the limit), and a whole run's steps."""
    until = clock.now() + share
    # A first step opens and allocates what no later one does: it is in none of the figures.
    work.run(0.0)
    # The work before says how many steps a run has: then a part of a run is enough.
    most = min(limit, max(share, limit / 16)) if whole_steps else limit
    runs: list[float] = []
    while True:
        done = work.run(most)
        if done.finished:
            runs.append(done.seconds)
            whole_steps = done.steps
        elif whole_steps and done.steps >= _FEWEST_STEPS:
            runs.append(done.seconds * whole_steps / done.steps)
        elif most < limit:
            most = min(limit, _LONGER * most)
            continue
        else:
            runs.append(math.inf)
        misses = sum(each > limit for each in runs)
        if len(runs) == _MOST_RUNS or misses > 1 or clock.now() + done.seconds > until:
            # Of so few, the second slowest: another program's moment is not the device's pace.
            return float(np.quantile(runs, 0.9, method="lower")), whole_steps


# The largest number of columns: bracket it, refine it, confirm it.

_LADDER = 4
# Ks measured around the crossing. Eight in a row meet every residue modulo the width of a vector
# register, so that the window's average does not depend on where it starts.
_WINDOW = 8
# Blocks that each of them gets, in turns, so that a slow spell of the machine meets all of them.
_PASSES = 4
_CONFIRMATIONS = 3
# Share of the time box after which only the confirmation is left to do.
_REFINE_UNTIL = 0.7


@dataclass(frozen=True)
class Choice:
    """The chosen k, why, and everything that was measured on the way.

    `k` is None where the device declines. `fits`: the chosen k fits; `confirmed`: measured again
    after the search, it kept the deadline and, but for noise, the limit. `load_seconds` is what
    happened once before the first measurement (reading an artifact, making its session) and is in
    no other figure. `machine` is None where nobody asked for it.
    """

    k: int | None
    reason: str
    fits: bool
    confirmed: bool
    request: Request
    measurements: tuple[Measurement, ...]
    load_seconds: float
    elapsed_seconds: float
    machine: Machine | None = None

    def at(self, k: int | None) -> Measurement | None:
        """What was measured at `k`."""
        return next((entry for entry in self.measurements if entry.k == k), None)

    @property
    def p90_seconds(self) -> float | None:
        """The chosen k's p90; None where it was not measured."""
        measured = self.at(self.k)
        return None if measured is None else measured.p90_seconds


def choose_k(
    workload: Workload,
    request: Request,
    *,
    clock: Clock,
    start: float | None = None,
    progress: Callable[[Measurement], None] | None = None,
) -> Choice:
    """The largest k with which any workload fits; `start` is when the time box began (now)."""
    started = clock.now()
    start = started if start is None else start
    stopwatch = Stopwatch(workload, request, clock, start=start, progress=progress)
    impression = stopwatch.first_impression()
    search = _Search(stopwatch, request)
    # Twice: a cold start and one steady run are the least that says anything.
    if 2.0 * impression > stopwatch.seconds_left():
        search.out_of_time = True
    else:
        search.run()
    measurements = stopwatch.measurements()
    k = search.k if search.k > 0 else (1 if request.when_none_fits == "one" else None)
    return Choice(
        k=k,
        reason=_reason(request, search, measurements, impression),
        fits=search.k > 0,
        confirmed=search.confirmed,
        request=request,
        measurements=measurements,
        load_seconds=started - start,
        elapsed_seconds=clock.now() - start,
    )


class _Search:
    """`k`: the outcome, 0 where none fits. `confirmed`: it was measured again after the search and
    kept the deadline with at least half of the headroom. `out_of_time`: the time box ended before
    the ks were bracketed or the chosen one confirmed.
    """

    def __init__(self, stopwatch: Stopwatch, request: Request) -> None:
        self._stopwatch = stopwatch
        self._limit = request.limit_seconds
        self._deadline = request.deadline_seconds
        self._tolerated = (self._limit + self._deadline) / 2.0
        self._max_k = request.max_k
        self._leave_seconds = stopwatch.seconds_left() * (1.0 - _REFINE_UNTIL)
        self.k = 0
        self.confirmed = False
        self.out_of_time = False

    def run(self) -> None:
        """Search."""
        for k in self._ladder():
            took = self._measure(k)
            if took is None or took > self._limit:
                break
        if not self._stopwatch.runs:
            self.out_of_time = True
            return
        self._refine()
        self._confirm()

    def _ladder(self) -> Iterator[int]:
        k = 1
        while k < self._max_k:
            yield k
            k *= _LADDER
        yield self._max_k

    def _refine(self) -> None:
        """Measure around the crossing until every k there was measured often enough."""
        while True:
            low, high = bounds(self._stopwatch.runs, self._limit, self._max_k)
            if low >= high:
                return
            k = self._next(self._estimate())
            if k is None or self._time_to_confirm() or not self._stopwatch.measure(k):
                return

    def _confirm(self) -> None:
        """Measure the estimate again; step down while it misses, further each time."""
        candidate, step = self._not_past_one(self._estimate()), 1
        while candidate >= 1:
            if not self._measure_again(candidate):
                self.k, self.out_of_time = self._largest_seen(candidate), True
                return
            if self._keeps(candidate):
                self.k, self.confirmed = candidate, True
                return
            if candidate == 1:
                return
            candidate = self._not_past_one(min(candidate - step, self._estimate()))
            step *= 2

    def _not_past_one(self, candidate: int) -> int:
        """The candidate; 1 instead of less where it was seen to fit, whatever the fit line says."""
        return 1 if candidate < 1 and self._stopwatch.p90(1) <= self._limit else candidate

    def _keeps(self, k: int) -> bool:
        if k == 1 and self._stopwatch.p90(1) <= self._limit:
            return True
        estimate = p90_estimates(self._stopwatch.runs)[k]
        return estimate <= self._tolerated and self._stopwatch.p90(k) <= self._deadline

    def _next(self, centre: int) -> int | None:
        """The window's least measured k, the nearest to the centre first; None if all are done."""
        first = max(1, min(centre - _WINDOW // 2 + 1, self._max_k - _WINDOW + 1))
        window = range(first, min(first + _WINDOW, self._max_k + 1))
        todo = [k for k in window if self._stopwatch.blocks(k) < _PASSES]
        return min(
            todo, key=lambda k: (self._stopwatch.blocks(k), abs(k - centre - 0.4)), default=None
        )

    def _measure(self, k: int) -> float | None:
        if not self._time_to_confirm() and self._stopwatch.measure(k):
            return p90_estimates(self._stopwatch.runs)[k]
        self.out_of_time = True
        return None

    def _time_to_confirm(self) -> bool:
        return self._stopwatch.seconds_left() <= self._leave_seconds

    def _measure_again(self, k: int) -> bool:
        """Up to three more blocks; True where at least one was taken just now."""
        if not self._stopwatch.measure(k):
            return False
        for _ in range(_CONFIRMATIONS - 1):
            # The rest of the box is for the next smaller k, should this one miss.
            if self._stopwatch.seconds_left() > self._leave_seconds / 2.0:
                self._stopwatch.measure(k)
        return True

    def _estimate(self) -> int:
        return largest_fitting(self._stopwatch.runs, self._limit, self._max_k)

    def _largest_seen(self, at_most: int) -> int:
        """The largest measured k up to `at_most` that kept the deadline; 0 where none did."""
        seen = [k for k in self._stopwatch.runs if k <= at_most]
        return max((k for k in seen if self._keeps(k)), default=0)


def _reason(
    request: Request, found: _Search, measurements: tuple[Measurement, ...], impression: float
) -> str:
    limit = (
        f"{_shown(request.limit_seconds)} ({1.0 - request.headroom:.0%} of the "
        f"{_shown(request.deadline_seconds)} deadline)"
    )
    cut = f" The time box of {_shown(request.time_box_seconds)} ended the search early."
    if found.k == 0:
        answer = (
            "k = 1 is taken all the same, as asked"
            if request.when_none_fits == "one"
            else "the device declines, as asked"
        )
        first = next((entry.p90_seconds for entry in measurements if entry.k == 1), None)
        if first is not None:
            return f"Even k = 1 misses: its p90 is {_shown(first)}, the limit {limit}; {answer}."
        if math.isfinite(impression):
            took = f"one run at k = 1 would take about {_shown(impression)}"
        else:
            took = "not even a small share of one run at k = 1 ended inside it"
        return (
            f"The time box of {_shown(request.time_box_seconds)} is too short to measure anything: "
            f"{took}. Nothing is known to fit; {answer}."
        )
    chosen = next(entry for entry in measurements if entry.k == found.k)
    why = f"k = {found.k} takes {_shown(chosen.p90_seconds or 0.0)} at p90, the limit is {limit}"
    if found.k == request.max_k:
        why += "; it is the largest k that was allowed"
    elif not found.out_of_time:
        why += "; larger ones are expected to miss"
    if not found.confirmed:
        why += ". It was not confirmed."
    elif (chosen.p90_seconds or 0.0) <= request.limit_seconds:
        why += ". Measured again, it still fits."
    else:
        why += ". Measured again, it used some of the headroom and kept the deadline."
    return why + (cut if found.out_of_time else "")


# From noisy runs at some ks to the largest k whose p90 keeps the limit.

Runs = Mapping[int, Sequence[Sequence[float]]]
"""Per k, blocks of steady runs in seconds."""

# Standard errors by which a cost must be away from the limit to count as clear of it.
_CLEAR = 3.0
# Relative distance from the limit that is asked in addition of a k measured only once.
_ONE_BLOCK = 0.5
# A median's standard error in those of a mean, for normal noise.
_MEDIAN_ERROR = 1.2533


def p90_estimates(runs: Runs) -> dict[int, float]:
    """The p90 per k in seconds: its own median times a tail ratio shared by all ks.

    A p90 of a few runs is a lottery, a median is not. What makes the tail (the scheduler, other
    programs) is the machine's, not k's, so p90 / median is pooled over every run there is.
    """
    medians = {k: _median(blocks) for k, blocks in runs.items()}
    relative = [
        np.concatenate([np.asarray(block) for block in blocks]) / medians[k]
        for k, blocks in runs.items()
    ]
    tail = float(np.quantile(np.concatenate(relative), 0.9)) if relative else 1.0
    return {k: median * max(tail, 1.0) for k, median in medians.items()}


def relative_errors(runs: Runs) -> dict[int, float]:
    """The relative standard error of each k's median, from the spread in and between blocks."""
    within = _pooled([block for blocks in runs.values() for block in blocks])
    between = _pooled([[_middle(block) for block in blocks] for blocks in runs.values()])
    return {
        k: max(
            _MEDIAN_ERROR * within / math.sqrt(sum(len(block) for block in blocks)),
            between / math.sqrt(len(blocks)),
        )
        for k, blocks in runs.items()
    }


def bounds(runs: Runs, limit_seconds: float, max_k: int) -> tuple[int, int]:
    """The largest k that clearly fits (0: none), and the largest that is not clearly beaten."""
    limit_seconds *= 1.0 + 1e-9  # a tie is a fit, whatever the clock's rounding
    cost = p90_estimates(runs)
    error = {k: _doubt(relative, len(runs[k])) for k, relative in relative_errors(runs).items()}
    low = max((k for k in cost if cost[k] * (1.0 + error[k]) <= limit_seconds), default=0)
    beaten = [k for k in cost if k > low and cost[k] * (1.0 - error[k]) > limit_seconds]
    return low, min(beaten, default=max_k + 1) - 1


def _doubt(relative_error: float, blocks: int) -> float:
    """How far from the limit a cost has to be. One block may have met an unusual moment."""
    lucky = _ONE_BLOCK if blocks == 1 and relative_error > 0.0 else 0.0
    return _CLEAR * relative_error + lucky


def largest_fitting(runs: Runs, limit_seconds: float, max_k: int) -> int:
    """The largest k in 0 to `max_k` whose p90 is estimated to be at most the limit.

    Where measurements are clear of the limit they decide alone. Between the largest k that clearly
    fits and the next one that clearly does not, a straight line through the neighbourhood decides:
    it averages the noise of all ks around the crossing, so that two measurements agree.
    """
    low, high = bounds(runs, limit_seconds, max_k)
    if low >= high or not runs:
        return low
    cost = p90_estimates(runs)
    passing = max((k for k in cost if cost[k] <= limit_seconds), default=0)
    near = sorted(k for k in cost if max(1, passing) / 2 <= k <= 4 * max(1, passing))
    if len(near) < 2:
        return min(max(passing, low), high)
    weights = np.sqrt([float(sum(len(block) for block in runs[k])) for k in near])
    seconds = np.array([cost[k] for k in near])
    crossing = _crossing(np.array(near, np.float64), seconds, weights, limit_seconds)
    return min(max(crossing, low), high)


def _crossing(
    ks: NDArray[np.float64],
    seconds: NDArray[np.float64],
    weights: NDArray[np.float64],
    limit_seconds: float,
) -> int:
    """Where the line of least squares reaches the limit, rounded down; a level line never does."""
    # Relative residuals: noise grows with the time it disturbs.
    slope, offset = (float(value) for value in np.polyfit(ks, seconds, 1, w=weights / seconds))
    if slope * float(np.ptp(ks)) <= 1e-9 * abs(float(seconds.mean())):
        fits = float(np.average(seconds, weights=weights)) <= limit_seconds
        return np.iinfo(np.int32).max if fits else 0
    return math.floor(min((limit_seconds - offset) / slope, 1e9) + 1e-9)


def _median(blocks: Sequence[Sequence[float]]) -> float:
    return float(np.median([seconds for block in blocks for seconds in block]))


def _middle(block: Sequence[float]) -> float:
    return float(np.median(block))


def _pooled(groups: Sequence[Sequence[float]]) -> float:
    """The relative standard deviation within groups, robust against outliers."""
    deviations = [
        np.abs(np.asarray(group) / np.median(group) - 1.0)
        * math.sqrt(len(group) / (len(group) - 1))
        for group in groups
        if len(group) > 1
    ]
    return 1.4826 * float(np.median(np.concatenate(deviations))) if deviations else 0.0
