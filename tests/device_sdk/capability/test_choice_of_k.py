"""The choice of k on made-up costs and a clock that moves only when told."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.capability import Request, choose_k
from tests.fakes.capability_fakes import FakeClock, FakeWorkload, choose


def affine(fixed: float, per_k: float) -> Callable[[int], float]:
    return lambda k: fixed + per_k * k


@settings(max_examples=25)
@given(
    fixed=st.floats(2e-3, 0.02),
    per_k=st.floats(1e-6, 2e-3),
    max_k=st.integers(1, 256),
    target=st.floats(0.2, 1.3),
)
def test_without_noise_the_choice_is_exact(
    fixed: float, per_k: float, max_k: int, target: float
) -> None:
    cost = affine(fixed, per_k)
    limit = fixed + per_k * max_k * target
    request = Request(limit / 0.8, max_k=max_k, time_box_seconds=1e5)
    choice, _ = choose(cost, request)
    fitting = [k for k in range(1, max_k + 1) if cost(k) <= request.limit_seconds * (1 + 1e-9)]
    assert choice.k == max(fitting, default=1)
    assert choice.fits == bool(fitting)
    assert choice.confirmed == bool(fitting)


@pytest.mark.parametrize("jump_at", [2, 7, 17, 33, 64])
def test_a_jump_in_the_cost_is_found(jump_at: int) -> None:
    choice, _ = choose(
        lambda k: 0.001 if k < jump_at else 0.002, Request(0.00125, time_box_seconds=60.0)
    )
    assert choice.k == jump_at - 1


@pytest.mark.parametrize(("fixed", "per_k", "limit"), [(1e-4, 3e-6, 2e-4), (0.001, 5e-5, 0.003)])
def test_two_runs_on_a_quiet_machine_agree(fixed: float, per_k: float, limit: float) -> None:
    request = Request(limit / 0.8, time_box_seconds=10.0)
    chosen = [
        choose(affine(fixed, per_k), request, noise=0.02, spikes=0.01, cold=3.0, seed=seed)[0].k
        for seed in range(6)
    ]
    ks = [k for k in chosen if k is not None]
    assert len(ks) == 6
    assert max(ks) - min(ks) <= 1
    exact = (limit - fixed) / per_k
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
    choice, clock = choose(cost, request, noise=noise, cold=2.0)
    # At most the run that was under way (emulated waiting is cut), or the 1/64 shares that warn.
    longest = max([cost(m.k) for m in choice.measurements], default=cost(1) / 16.0)
    assert clock.now() - 100.0 <= box + 2.0 * longest * math.exp(5.0 * noise)
    assert choice.k is not None
    assert 1 <= choice.k <= request.max_k


def test_a_step_slower_than_the_box_is_not_even_started() -> None:
    clock = FakeClock()
    work = FakeWorkload(clock, lambda k: 40.0)
    choice = choose_k(work, Request(1.0, time_box_seconds=5.0), clock=clock)
    assert clock.now() - 100.0 < 2.0
    assert work.share < 1.0
    assert (choice.k, choice.fits, choice.measurements) == (1, False, ())
    assert "too short to measure" in choice.reason
    assert "40 s" in choice.reason


def test_an_emulated_step_slower_than_the_box_ends_with_the_box() -> None:
    choice, clock = choose(lambda k: 0.5, Request(1.0, time_box_seconds=3.0, slowdown=10_000.0))
    assert clock.now() - 100.0 <= 3.1
    assert not choice.fits


def test_where_none_fits_the_caller_decides() -> None:
    taken, _ = choose(lambda k: 0.1, Request(0.01, when_none_fits="one"))
    assert (taken.k, taken.fits) == (1, False)
    assert "Even k = 1 misses" in taken.reason
    declined, _ = choose(lambda k: 0.1, Request(0.01, when_none_fits="decline"))
    assert (declined.k, declined.fits) == (None, False)


def test_a_slower_device_takes_a_smaller_k() -> None:
    request = Request(0.01, time_box_seconds=20.0)
    fast, _ = choose(affine(2e-4, 1e-4), request)
    slow, clock = choose(affine(2e-4, 1e-4), Request(0.01, time_box_seconds=20.0, slowdown=8.0))
    assert fast.k == 64
    assert slow.k == 8  # (0.008 / 8 - 0.0002) / 0.0001
    assert clock.slept > 0.0


def test_cold_starts_are_reported_apart() -> None:
    choice, _ = choose(lambda k: 0.001 * k, Request(0.01, max_k=4), cold=50.0)
    for entry in choice.measurements:
        assert entry.cold_start_seconds == pytest.approx(0.05 * entry.k)
        assert entry.median_seconds == pytest.approx(0.001 * entry.k)
        assert entry.p90_seconds == pytest.approx(0.001 * entry.k)
        assert entry.runs >= 8


def test_the_winner_keeps_the_deadline_in_its_own_runs() -> None:
    for seed in range(5):
        request = Request(0.004, time_box_seconds=10.0)
        choice, _ = choose(affine(5e-4, 5e-5), request, noise=0.1, spikes=0.05, seed=seed)
        assert choice.k is not None
        winner = choice.at(choice.k)
        assert winner.p90_seconds is not None
        assert winner.p90_seconds <= request.deadline_seconds


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"deadline_seconds": 0.0}, "deadline_seconds is 0.0"),
        ({"deadline_seconds": math.nan}, "deadline_seconds is nan"),
        ({"deadline_seconds": 1.0, "headroom": 1.0}, "headroom is 1.0"),
        ({"deadline_seconds": 1.0, "max_k": 0}, "max_k is 0"),
        ({"deadline_seconds": 1.0, "slowdown": 0.5}, "slowdown is 0.5"),
        ({"deadline_seconds": 1.0, "time_box_seconds": -1.0}, "time_box_seconds is -1.0"),
        ({"deadline_seconds": 1.0, "when_none_fits": "cry"}, "when_none_fits is 'cry'"),
    ],
)
def test_impossible_requests_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**wrong)  # type: ignore[arg-type]


def test_what_a_run_costs_whatever_its_size_is_not_taken_for_its_work() -> None:
    clock = FakeClock()
    work = FakeWorkload(clock, affine(5e-4, 1e-5), overhead=0.002)
    choice = choose_k(work, Request(0.01, time_box_seconds=0.2), clock=clock)
    assert choice.k == 64
    assert choice.fits


@pytest.mark.parametrize("held_up_runs", [{1}, {0, 1}, {1, 2}, {0, 1, 2, 3}])
def test_a_moment_without_the_processor_is_not_taken_for_a_slow_device(
    held_up_runs: set[int],
) -> None:
    clock = FakeClock()
    # Held up for 0.1 s while it runs a 64th: scaled up, 6.5 s, more than the box.
    work = FakeWorkload(
        clock, affine(2e-3, 1e-4), overhead=1e-3, held_up=0.1, held_up_runs=held_up_runs
    )
    choice = choose_k(work, Request(5.0, max_k=8, time_box_seconds=5.0), clock=clock)
    assert (choice.k, choice.fits) == (8, True), choice.reason


def test_fixed_costs_that_fill_a_share_are_not_scaled_up_with_it() -> None:
    clock = FakeClock()
    # A 64th takes 20 ms, and so does the whole: eight times a 64th might not have fitted.
    work = FakeWorkload(clock, affine(1e-4, 1e-5), overhead=0.02)
    choice = choose_k(work, Request(1.0, time_box_seconds=1.0), clock=clock)
    assert (choice.k, choice.fits) == (64, True), choice.reason


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
    choice, _ = choose(affine(fixed, per_k), request, noise=0.25, spikes=0.05, seed=seed)
    one = choice.at(1)
    if not choice.fits and one is not None and one.p90_seconds is not None:
        assert one.p90_seconds > request.limit_seconds, choice.reason
