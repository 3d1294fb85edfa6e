"""A clock that only moves when told, and work that moves it."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

import numpy as np

from device_sdk.capability import Choice, Machine, Request, choose_k


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
        self._clock = clock
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
        self._clock.seconds += seconds


MACHINE = Machine("a processor", "x86_64", 2.0, 1, "CPUExecutionProvider", None, None, {})


def choose(
    cost: Callable[[int], float],
    request: Request,
    *,
    noise: float = 0.0,
    spikes: float = 0.0,
    cold: float = 1.0,
    seed: int = 0,
) -> tuple[Choice, FakeClock]:
    """A choice on made-up costs, and the clock it was made with (which started at 100 s)."""
    clock = FakeClock()
    work = FakeWorkload(clock, cost, noise=noise, spikes=spikes, cold=cold, seed=seed)
    return replace(choose_k(work, request, clock=clock), machine=MACHINE), clock
