"""Choosing k for a round of least squares, whose cost is no longer in proportion to it."""

from __future__ import annotations

import numpy as np
import pytest

from device_sdk.capability import Request, WorkSizes, choose_solved_dimension
from device_sdk.capability.bench import SolveWorkload
from device_sdk.capability.stopwatch import Stopwatch
from device_sdk.methods.scatter.least_squares import LeastSquares
from tests.fakes.capability_fakes import FakeClock, FakeWorkload


def test_a_generous_deadline_takes_every_dimension_and_a_throttled_device_fewer() -> None:
    sizes = WorkSizes(300, 1000, users=5)
    whole = choose_solved_dimension(Request(30.0, max_k=32), sizes)
    assert (whole.k, whole.fits) == (32, True)
    assert whole.machine is not None and whole.machine.provider == "NumPy"
    least = whole.at(1)
    assert least is not None and least.median_seconds is not None
    slow = choose_solved_dimension(
        Request(least.median_seconds * 100.0, max_k=32, slowdown=1000.0), sizes
    )
    assert (slow.k, slow.fits) == (1, False)


def test_the_work_is_a_rounds_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All users at full share, by the very call that a learner makes."""
    seen = []
    own = LeastSquares.trained

    def watched(self: LeastSquares, users: object, k: int) -> object:
        update = own(self, users, k)  # type: ignore[arg-type]
        seen.append((int(update["k"]), int(update["counts"].sum()), int(update["users"])))
        return update

    monkeypatch.setattr(LeastSquares, "trained", watched)
    rng = np.random.default_rng(0)
    work = SolveWorkload(WorkSizes(50, 100, users=3), width=8, rng=rng)
    for k, share in ((1, 0.1), (5, 1.0), (8, 1.0)):
        work.prepare(k, share)
        work.run()
    assert seen == [(1, 10, 1), (5, 100, 3), (8, 100, 3)]


def test_a_run_that_may_outlast_the_box_by_its_cube_is_not_begun() -> None:
    clock = FakeClock()
    work = FakeWorkload(clock, lambda k: 1e-4 + 1e-5 * k**3)
    watch = Stopwatch(work, Request(75.0, time_box_seconds=4.0), clock, start=clock.now())
    assert watch.measure(4) and watch.measure(16)
    assert not watch.measure(100)  # 10 s a run
    assert work.k == 16


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="11 interactions of 2 user"):
        choose_solved_dimension(Request(1.0), WorkSizes(5, 11, users=2))
