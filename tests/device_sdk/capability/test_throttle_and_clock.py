"""Emulating a slower device, and the real clock's sleeps."""

from __future__ import annotations

import time

import pytest

from device_sdk.system.clock import MonotonicClock, slowed
from tests.fakes.capability_fakes import FakeClock


def test_a_throttled_run_takes_the_factor_longer() -> None:
    clock = FakeClock()
    start = clock.now()
    clock.sleep(0.25)
    assert slowed(clock, start, 8.0) == pytest.approx(2.0)
    assert clock.now() == pytest.approx(102.0)


def test_the_real_clock_never_wakes_early() -> None:
    clock = MonotonicClock()
    for seconds in (0.0, 0.0002, 0.004):
        start = time.perf_counter()
        clock.sleep(seconds)
        assert time.perf_counter() - start >= seconds
