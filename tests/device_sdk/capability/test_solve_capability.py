"""Choosing k for a round of least squares, whose cost is no longer in proportion to it."""

from __future__ import annotations

import numpy as np
import pytest

from device_sdk.capability import Request, WorkSizes, bench_solved
from device_sdk.capability.bench import SolveWorkload
from device_sdk.methods.scatter.least_squares import LeastSquares
from tests.fakes.capability_fakes import FakeClock, FakeWorkload, chosen


def test_a_generous_deadline_takes_every_dimension_and_a_throttled_device_fewer() -> None:
    sizes = WorkSizes(300, 1000, users=5)
    whole = bench_solved(Request(30.0), sizes, 32)
    assert whole.choice is not None and (whole.choice.option, whole.choice.fits) == ("32", True)
    assert whole.choice.confirmed and whole.machine.provider == "NumPy"
    least = whole.rows[0].p50_seconds
    assert least is not None and whole.rows[0].option == "1"
    slow = bench_solved(Request(least * 100.0, slowdown=1000.0), sizes, 32).choice
    assert slow is not None and (slow.option, slow.fits) == ("1", False)
    declined = bench_solved(Request(1e-9), sizes, 32, when_none_fits="decline").choice
    assert declined is not None and (declined.option, declined.fits) == (None, False)


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
    work = FakeWorkload(FakeClock(), lambda k: 1e-4 + 1e-5 * k**3)
    k, fit, clock = chosen(work, Request(75.0, time_box_seconds=4.0), 128)  # 21 s a run at 128
    assert k == 128, fit.reason
    assert clock.now() - 100.0 < 10.0


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="11 interactions of 2 user"):
        bench_solved(Request(1.0), WorkSizes(5, 11, users=2), 8)
