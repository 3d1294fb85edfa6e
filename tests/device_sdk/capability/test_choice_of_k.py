"""The choice of k on made-up costs and a clock that moves only when told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.capability import Request
from tests.fakes.capability_fakes import FakeClock, FakeWorkload, chosen


def affine(fixed: float, per_k: float) -> Callable[[int], float]:
    return lambda k: fixed + per_k * k


@settings(max_examples=25)
@given(
    fixed=st.floats(2e-3, 0.02),
    per_k=st.floats(1e-6, 2e-3),
    most=st.integers(1, 256),
    target=st.floats(0.2, 1.3),
)
def test_without_noise_the_choice_is_exact(
    fixed: float, per_k: float, most: int, target: float
) -> None:
    cost = affine(fixed, per_k)
    request = Request((fixed + per_k * most * target) / 0.8, time_box_seconds=1e5)
    k, _, _ = chosen(cost, request, most)
    fitting = [each for each in range(1, most + 1) if cost(each) <= request.limit_seconds]
    near = math.isclose(cost(max(fitting, default=0) + 1), request.limit_seconds, rel_tol=1e-6)
    assert k == max(fitting, default=0) or near


@pytest.mark.parametrize("jump_at", [2, 7, 17, 33, 64])
def test_a_jump_in_the_cost_is_found_by_few_measurements(jump_at: int) -> None:
    k, fit, _ = chosen(
        lambda k: 0.001 if k < jump_at else 0.002, Request(0.00125, time_box_seconds=60.0)
    )
    assert k == jump_at - 1
    assert len(fit.measured) <= 2 + 2 * 6  # two halve what is left of 64


@pytest.mark.parametrize(("fixed", "per_k", "limit"), [(1e-4, 3e-6, 2e-4), (0.001, 5e-5, 0.003)])
def test_two_runs_on_a_quiet_machine_agree(fixed: float, per_k: float, limit: float) -> None:
    request = Request(limit / 0.8, time_box_seconds=10.0)
    ks = [
        chosen(affine(fixed, per_k), request, noise=0.02, spikes=0.01, cold=3.0, seed=seed)[0]
        for seed in range(12)
    ]
    exact = (limit - fixed) / per_k
    assert max(ks) - min(ks) <= 0.1 * exact
    assert 0.85 * exact <= min(ks) <= max(ks) <= exact


@settings(max_examples=40)
@given(
    fixed=st.floats(1e-4, 5.0),
    per_k=st.floats(0.0, 0.5),
    deadline=st.floats(1e-4, 10.0),
    box=st.floats(0.05, 8.0),
    slowdown=st.floats(1.0, 50.0),
    noise=st.floats(0.0, 0.3),
)
def test_never_outlives_its_time_box_by_more_than_a_run(
    fixed: float, per_k: float, deadline: float, box: float, slowdown: float, noise: float
) -> None:
    request = Request(deadline, time_box_seconds=box, slowdown=slowdown)
    cost = affine(fixed, per_k)
    _, fit, clock = chosen(cost, request, noise=noise, cold=2.0)
    longest = max(cost(1 + each.place) for each in fit.measured)
    assert clock.now() - 100.0 <= box + 2.0 * longest * math.exp(5.0 * noise)


def test_a_step_slower_than_the_deadline_is_not_even_started() -> None:
    clock = FakeClock()
    work = FakeWorkload(clock, lambda k: 40.0)
    k, fit, _ = chosen(work, Request(1.0, time_box_seconds=5.0))
    assert clock.now() - 100.0 < 5.0
    assert work.share < 1.0
    assert (k, fit.place) == (0, None)
    assert "k = 1 did not end in time" in fit.reason


def test_a_slower_device_takes_a_smaller_k() -> None:
    request = Request(0.01, time_box_seconds=20.0)
    fast, _, _ = chosen(affine(2e-4, 1e-4), request)
    slow, fit, clock = chosen(affine(2e-4, 1e-4), replace(request, slowdown=8.0))
    assert fast == 64
    assert slow == 8  # (0.008 / 8 - 0.0002) / 0.0001
    assert clock.slept == 0.0
    assert fit.p90_seconds == pytest.approx(0.008)


def test_cold_starts_are_in_no_figure() -> None:
    _, fit, _ = chosen(lambda k: 0.001 * k, Request(0.02), 4, cold=5.0)
    for each in fit.measured:
        assert each.p50_seconds == pytest.approx(0.001 * (1 + each.place))
        assert len(each.seconds) >= 8


def test_the_winner_keeps_the_deadline_in_its_own_runs() -> None:
    for seed in range(5):
        request = Request(0.004, time_box_seconds=10.0)
        k, fit, _ = chosen(affine(5e-4, 5e-5), request, noise=0.1, spikes=0.05, seed=seed)
        winner = next(each for each in fit.measured if each.place == k - 1)
        assert float(np.quantile(winner.seconds, 0.9)) <= request.deadline_seconds


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"deadline_seconds": 0.0}, "deadline_seconds is 0.0"),
        ({"deadline_seconds": math.nan}, "deadline_seconds is nan"),
        ({"deadline_seconds": 1.0, "headroom": 1.0}, "headroom is 1.0"),
        ({"deadline_seconds": 1.0, "slowdown": 0.5}, "slowdown is 0.5"),
        ({"deadline_seconds": 1.0, "time_box_seconds": -1.0}, "time_box_seconds is -1.0"),
    ],
)
def test_impossible_requests_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**wrong)


def test_what_a_run_costs_whatever_its_size_is_not_taken_for_its_work() -> None:
    work = FakeWorkload(FakeClock(), affine(5e-4, 1e-5), overhead=0.002)
    k, _, _ = chosen(work, Request(0.01, time_box_seconds=0.2))
    assert k == 64


@pytest.mark.parametrize("held_up_runs", [{1}, {0, 1}, {1, 2}, {0, 1, 2, 3}])
def test_a_moment_without_the_processor_is_not_taken_for_a_slow_device(
    held_up_runs: set[int],
) -> None:
    # Held up for 0.1 s while it runs a 64th: scaled up, 6.5 s, more than the box.
    work = FakeWorkload(
        FakeClock(), affine(2e-3, 1e-4), overhead=1e-3, held_up=0.1, held_up_runs=held_up_runs
    )
    k, fit, _ = chosen(work, Request(5.0, time_box_seconds=5.0), 8)
    assert k == 8, fit.reason


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    fixed=st.floats(1e-3, 1e-2),
    per_k=st.floats(1e-5, 2e-3),
    room=st.floats(0.9, 1.6),
)
def test_none_fits_is_said_only_where_one_column_was_seen_to_miss(
    seed: int, fixed: float, per_k: float, room: float
) -> None:
    request = Request((fixed + per_k) * room / 0.8, time_box_seconds=5.0)
    _, fit, _ = chosen(affine(fixed, per_k), request, noise=0.25, spikes=0.05, seed=seed)
    if fit.place is None:
        assert fit.measured[0].p90_seconds > request.limit_seconds, fit.reason
