"""Which is the largest option that fits into so many seconds?

Options are works whose cost grows, smallest first, each of which can be cut short: rounds with the
rungs of a ladder, with artifacts of unequal size, or with k columns of a model. One fits when the
90th percentile of its time keeps the limit. As few are measured as a line through what was measured
needs, and none for much longer than its share of the time box.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar

import numpy as np

from device_sdk.errors import CallEnded
from device_sdk.fields import Declared, Within
from device_sdk.system.clock import Clock
from device_sdk.system.printable import in_words

_INSTANT = 1e-9
"""A clock may say that a run took no time."""
_FEWEST_RUNS, _MOST_RUNS = 8, 2000
_LEAST_SECONDS = 0.05
"""Of quick runs more than the fewest are taken, for so long."""
_FEWEST_STEPS = 3
"""Steps that an unfinished run must have made before its pace says anything."""
_LONGER = 3.0
"""How much longer it is run where it made fewer."""
_CONFIRMATIONS = 3
_MOST_DOUBTS = 2
"""How often one that missed is measured again."""
_TIE = 1.0 + 1e-9
"""A tie is a fit, whatever the clock's rounding."""


@dataclass(frozen=True)
class Request(Declared):
    """What is asked: the largest option for work that has to end within a deadline.

    An option fits when its p90 is at most `limit_seconds`, (1 - headroom) x the deadline.
    `time_box_seconds` is for the whole measurement; `slowdown` emulates a device that many times
    slower.
    """

    deadline_seconds: Annotated[float, Within(0, above=True)]
    headroom: Annotated[float, Within(0, 1, below=True)] = 0.2
    time_box_seconds: Annotated[float, Within(0, above=True)] = 10.0
    slowdown: Annotated[float, Within(1)] = 1.0

    @property
    def limit_seconds(self) -> float:
        """What an option's p90 may be."""
        return self.deadline_seconds * (1.0 - self.headroom)


@dataclass(frozen=True, slots=True)
class WorkDone:
    """One run of a work: how long, how many steps, whether it was cut short, and of how many steps
    a whole run is (0: not known)."""

    seconds: float
    steps: int
    finished: bool
    whole_steps: int = 0


class Option(Protocol):
    """A round's training with one artifact, say, on a state that is thrown away.

    ``size``: how many numbers it trains, say; costs between two sizes lie on a line.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> float: ...

    def run(self, most_seconds: float) -> WorkDone:
        """Do it once, at least one step of it; cut short between two steps after
        `most_seconds`. What it raises says that it does not run here."""


@dataclass(frozen=True, slots=True)
class TimedOption:
    """What was seen of an option on a device as slow as the request's.

    ``seconds``: of its runs; an estimate from the pace of its steps where a whole run did not fit
    the time box, infinite where it did not end by the limit.
    """

    place: int
    name: str
    seconds: tuple[float, ...]

    @property
    def p50_seconds(self) -> float:
        """Their median."""
        return float(np.median(self.seconds))

    @property
    def p90_seconds(self) -> float:
        """Of so few, the second slowest: another program's moment is not the device's pace."""
        return float(np.quantile(self.seconds, 0.9, method="lower"))


@dataclass(frozen=True, slots=True)
class Fit:
    """`place`: of the chosen option; None where even the smallest misses.

    `p90_seconds`: its own. `measured`: in the order in which they were measured.
    """

    place: int | None
    p90_seconds: float | None
    reason: str
    measured: tuple[TimedOption, ...] = ()


def choose(
    options: Sequence[Option],
    request: Request,
    clock: Clock,
    progress: Callable[[TimedOption], None] = lambda seen: None,
) -> Fit:
    """The largest of the `options`, which come smallest first, that fits.

    The two smallest are measured first. A line through what was measured then says which is likely
    the largest that fits, and where it is wrong it is drawn anew; where it does not halve what is
    left, the middle is next. While there is time the one that missed is measured again: another
    program may have run. The smallest one's first run is finished even past the time box, unless it
    misses, or says itself how large a part of it was done.

    One that raises is one that does not fit, for want of memory say, and so are larger ones; raises
    what the smallest does, and CallEnded.
    """
    limit = request.limit_seconds / request.slowdown
    stop_at = clock.now() + request.time_box_seconds
    seen: dict[int, TimedOption] = {}
    failed: dict[int, Exception] = {}
    low, high, whole_steps, halve = -1, len(options), 0, False
    doubts: Counter[int] = Counter()
    while True:
        left = high - low - 1
        if left:
            took = {place: each.p90_seconds / request.slowdown for place, each in seen.items()}
            likely = _likely_place([each.size for each in options], took, low, high, limit)
            place = low + (high - low) // 2 if halve else likely
            halve = not halve and len(took) > 1
        elif high < len(options) and high not in failed and doubts[high] < _MOST_DOUBTS:
            place = high
            again = min(limit, seen[high].p90_seconds / request.slowdown)
            if clock.now() + _FEWEST_STEPS * again > stop_at:
                break
            doubts[high] += 1
        else:
            break
        share = max(0.0, stop_at - clock.now()) / max(1, left).bit_length()
        try:
            runs, whole_steps = _timed(options[place], limit, share, whole_steps, clock)
        except Exception as error:
            if place == 0 or isinstance(error, CallEnded):
                raise
            runs, failed[place] = [math.inf], error
        seconds = tuple(each * request.slowdown for each in runs)
        seen[place] = TimedOption(place, options[place].name, seconds)
        progress(seen[place])
        most = _TIE * request.limit_seconds
        if seen[place].p90_seconds <= most:
            low = max(low, place)
        larger = (at for at in seen if at > low and seen[at].p90_seconds > most)
        high = min(larger, default=len(options))
        halve = halve and 2 * (high - low - 1) > left
    reason, measured = _reason(seen, failed, low, high, request), tuple(seen.values())
    if low < 0:
        return Fit(None, None, reason, measured)
    return Fit(low, seen[low].p90_seconds, reason, measured)


def _reason(
    seen: Mapping[int, TimedOption],
    failed: Mapping[int, Exception],
    low: int,
    high: int,
    request: Request,
) -> str:
    bound = (
        f"the limit is {_shown(request.limit_seconds)} "
        f"({1.0 - request.headroom:.0%} of {_shown(request.deadline_seconds)})"
    )

    def told(place: int) -> str:
        each = seen[place]
        if place in failed:
            return f"{each.name} does not run here ({in_words(failed[place])})"
        if not math.isfinite(each.p90_seconds):
            return f"{each.name} did not end in time"
        return f"{each.name} takes {_shown(each.p90_seconds)}"

    if low < 0:
        return f"Even the smallest misses: {told(0)}; {bound}."
    then = told(high) if high in seen else "it is the largest one"
    return f"{told(low)} at p90, {bound}; {then}."


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Kept = TypeVar("_Kept", bound=_Named)


def affordable(
    options: Sequence[_Kept], bytes_of: Callable[[_Kept], int | None], most: int | None, what: str
) -> tuple[list[_Kept], str]:
    """Those of the options that take no more than ``most`` bytes (None: no bound) of ``what``, or
    nobody knows how many; and what is said of the first that takes more."""
    if most is None:
        return [*options], ""
    taken = [bytes_of(each) or 0 for each in options]
    kept = [each for each, own in zip(options, taken, strict=True) if own <= most]
    over = [(each.name, own) for each, own in zip(options, taken, strict=True) if own > most]
    told = "".join(f" {name} takes {own:,} bytes {what}, of {most:,}." for name, own in over[:1])
    return kept, told


def confirmed(option: Option, request: Request, clock: Clock) -> tuple[bool, str]:
    """Whether it keeps the deadline when it is run again, and what is said of that."""
    deadline = request.deadline_seconds / request.slowdown
    until = clock.now() + max(request.time_box_seconds / _CONFIRMATIONS, deadline)
    runs: list[float] = []
    while len(runs) < _CONFIRMATIONS and (not runs or clock.now() + runs[-1] < until):
        done = option.run(deadline)
        runs.append(done.seconds if done.finished else math.inf)
    if float(np.quantile(runs, 0.9, method="lower")) <= deadline:
        return True, " Run again, it kept the deadline."
    return False, " Run again, it did not keep the deadline: is another program running?"


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


def _timed(
    option: Option, limit: float, share: float, whole_steps: int, clock: Clock
) -> tuple[list[float], int]:
    """Runs in seconds (infinite: not finished by the limit), and a whole run's steps."""
    began = clock.now()
    # A first step opens and allocates what no later one does: it is in none of the figures.
    first = option.run(0.0)
    whole_steps = first.whole_steps or whole_steps
    # Where a whole run's steps are known, a part of a run is enough.
    least = max(_INSTANT, _FEWEST_STEPS * first.seconds)
    most = min(limit, max(share, least)) if whole_steps else limit
    runs: list[float] = []
    while True:
        done = option.run(most)
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
        spent = clock.now() - began
        steady = (len(runs) >= _FEWEST_RUNS and spent > _LEAST_SECONDS) or len(runs) == _MOST_RUNS
        missed = misses > max(1, len(runs) // 10)
        if steady or missed or spent + done.seconds > share:
            return runs, whole_steps


def _shown(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


# Work with k columns of a model.

_PARTS = 64
"""A run's steps: so small a part is tried first, so that a run longer than it may be is noticed
before it is begun. One that runs cannot be stopped."""
_MOST_GROWTH, _LEAST_GROWTH = 8.0, 2.0


class Workload(Protocol):
    """Work whose cost grows with the latent dimension k."""

    def prepare(self, k: int, share: float = 1.0) -> None:
        """Get ready to run at `k`; do only a `share` (0 to 1] of the work in each run."""

    def run(self) -> object:
        """Do the work once, at the k and share prepared last; what it returns is ignored."""


@dataclass(slots=True)
class ColumnsOption:
    """A round of ``workload`` with ``k`` columns, an :class:`Option`; ``prepared`` is all its
    options': the k, and of how many parts, that the workload is ready for."""

    k: int
    workload: Workload
    clock: Clock
    prepared: list[tuple[int, int]]
    parts: int = field(default=1, init=False)

    @property
    def name(self) -> str:
        return f"k = {self.k}"

    @property
    def size(self) -> float:
        return float(self.k)

    def run(self, most_seconds: float) -> WorkDone:
        """All of it, or the first part that takes longer than ``most_seconds``: twice of that at
        most, for a part n times as large takes n times as long, or less."""
        seconds = self._seconds()
        while self.parts < _PARTS:
            growth = min(_MOST_GROWTH, _LEAST_GROWTH * most_seconds / max(seconds, _INSTANT))
            if growth < _LEAST_GROWTH:
                break
            self.parts = min(_PARTS, int(growth * self.parts))
            seconds = self._seconds()
        return WorkDone(seconds, self.parts, self.parts == _PARTS, _PARTS)

    def _seconds(self) -> float:
        if self.prepared != [(self.k, self.parts)]:
            self.workload.prepare(self.k, self.parts / _PARTS)
            self.prepared[:] = [(self.k, self.parts)]
            self.workload.run()  # it opens and allocates what no later one does
        start = self.clock.now()
        self.workload.run()
        return self.clock.now() - start


def columns(workload: Workload, most: int, clock: Clock) -> list[ColumnsOption]:
    """Its options: 1 to ``most`` columns."""
    prepared: list[tuple[int, int]] = []
    return [ColumnsOption(k, workload, clock, prepared) for k in range(1, most + 1)]
