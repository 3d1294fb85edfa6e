"""The clock of emulated devices: work by the yardstick, and sleep."""

from __future__ import annotations

import time

import numpy as np
import pytest

from aggregator.demo import work_clock
from aggregator.demo.work_clock import WorkClock, yardstick_seconds


def work() -> None:
    """Some milliseconds on the processor."""
    matrix = np.ones((200, 200))
    for _ in range(30):
        matrix = matrix @ matrix / 200.0


def test_sleep_counts_as_asked_and_waiting_does_not() -> None:
    clock = WorkClock(yardstick_seconds())
    began = clock.now()
    time.sleep(0.05)
    assert clock.now() - began < 0.02
    before = clock.now()
    clock.sleep(0.03)
    assert clock.now() - before == pytest.approx(0.03, abs=0.01)


def test_work_counts_in_what_the_yardstick_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    # The processor's time and the yardstick both double: the emulated device has not changed.
    found = []
    for pace in (1.0, 2.0):
        spent = iter(pace * seconds for seconds in (0.0, 0.004, 0.005, 0.009, 0.010))
        monkeypatch.setattr(work_clock.time, "thread_time", lambda spent=spent: next(spent))
        monkeypatch.setattr(work_clock, "_yardstick", lambda pace=pace: 0.0005 * pace)
        clock = WorkClock(0.0001)
        first = clock.now()
        found.append((first, clock.now() - first))
    # 4 ms of work each time, 1 ms for the yardstick in between, which is not counted.
    assert found[0] == pytest.approx((0.0008, 0.0008))
    assert found[1] == pytest.approx(found[0])
