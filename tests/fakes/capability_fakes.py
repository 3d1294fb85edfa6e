"""A clock that only moves when told, and work that moves it."""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np

from device_sdk.capability import Request, choose, columns
from device_sdk.capability.fit import Fit


class FakeClock:
    """Time passes in `sleep` only."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.slept = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.seconds += seconds
        self.slept += seconds


class FakeWorkload:
    """Each run takes `cost(k)` seconds times noise; the first runs at a k take longer.

    `overhead` seconds of a run do not shrink with the share that is run. `held_up` seconds are
    added to each run whose number, from 0, is in `held_up_runs`: other programs ran.
    """

    def __init__(
        self,
        clock: FakeClock,
        cost: Callable[[int], float],
        *,
        noise: float = 0.0,
        spikes: float = 0.0,
        cold: float = 1.0,
        overhead: float = 0.0,
        held_up: float = 0.0,
        held_up_runs: Container[int] = (),
        seed: int = 0,
    ) -> None:
        self.clock = clock
        self._cost = cost
        self._noise = noise
        self._spikes = spikes
        self._cold = cold
        self._overhead = overhead
        self._held_up = held_up
        self._held_up_runs = held_up_runs
        self._rng = np.random.default_rng(seed)
        self.k = 0
        self.share = 0.0
        self.fresh = True
        self.runs = 0

    def prepare(self, k: int, share: float = 1.0) -> None:
        assert k >= 1
        assert 0.0 < share <= 1.0
        self.k, self.share, self.fresh = k, share, True

    def run(self) -> None:
        seconds = self._overhead + self._cost(self.k) * self.share
        if self._noise:
            seconds *= float(np.exp(self._noise * self._rng.standard_normal()))
        if self._spikes and self._rng.random() < self._spikes:
            seconds *= 1.0 + 3.0 * self._rng.random()
        if self.fresh:
            seconds *= self._cold
        if self.runs in self._held_up_runs:
            seconds += self._held_up
        self.fresh = False
        self.runs += 1
        self.clock.seconds += seconds


def chosen(
    work: FakeWorkload | Callable[[int], float],
    request: Request,
    most: int = 64,
    *,
    noise: float = 0.0,
    spikes: float = 0.0,
    cold: float = 1.0,
    seed: int = 0,
) -> tuple[int, Fit, FakeClock]:
    """The k that is chosen of 1 to ``most`` (0: none fits) on made-up costs, how, and the clock,
    which started at 100 s."""
    if not isinstance(work, FakeWorkload):
        work = FakeWorkload(FakeClock(), work, noise=noise, spikes=spikes, cold=cold, seed=seed)
    fit = choose(columns(work, most, work.clock), request, work.clock)
    return 0 if fit.place is None else 1 + fit.place, fit, work.clock
