"""Thousands whose sessions are lost at once, and one worker: devices' waits and its bounds, in
simulated time. What an open costs passes on the clock."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from device_sdk.system.clock import Backoff
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.admission import OpenSchedule, WorkBudget
from device_sdk.wire.seal.session_table import _DENIALS_SHARE
from device_sdk.world import Pace
from tests.fakes.parties import Clock

PACE = Pace()
DEVICES, SHARE = 2000, 0.35
OPEN_SECONDS, OUTSIDE_SECONDS, DENIAL_SECONDS, LOOK_SECONDS = 0.0075, 0.0025, 0.0005, 0.0001
"""An open within its budget and beside it, a denial, and a message that is refused: ten times what
they take, for a tenth of the devices."""


@dataclass
class Spread:
    opened: list[float]
    busy: int


class _Device:
    def __init__(self, rng: np.random.Generator) -> None:
        self.lost, self.sends = True, 0
        most = PACE.most_seconds
        self.opens, self.updates = (
            Backoff(rng, first_seconds=PACE.answer_seconds, most_seconds=most) for _ in range(2)
        )
        self.renews = Backoff(rng, first_seconds=PACE.renew_seconds, most_seconds=most)
        self.reopens = Backoff(rng, first_seconds=PACE.reopen_seconds, most_seconds=most)


def storm(*, heeds: bool, seed: int, absent: float = 0.0) -> Spread:
    """All send an update within five seconds. ``heeds``: the waits that they are told. ``absent``:
    the part of them that asks and does not come."""
    rng, clock = np.random.default_rng(seed), Clock(1000.0)
    budget, denials = WorkBudget(SHARE, clock), WorkBudget(_DENIALS_SHARE * SHARE, clock)
    schedule = OpenSchedule(SHARE, clock)
    devices = [_Device(rng) for _ in range(DEVICES)]
    gone = set(rng.permutation(DEVICES)[: round(absent * DEVICES)].tolist())
    due = [(1000.0 + rng.uniform(0, 5), number, number) for number in range(DEVICES)]
    heapq.heapify(due)
    order = itertools.count(DEVICES)
    spread, next_sweep = Spread([], 0), 1002.0
    while due:
        at, _, number = heapq.heappop(due)
        device, sender = devices[number], b"%d" % number
        if number in gone and not device.lost:
            continue
        clock.seconds = max(clock.seconds, at) + LOOK_SECONDS
        if clock.seconds >= next_sweep:
            schedule.sweep()
            next_sweep += 10.0
        try:
            if not device.lost:
                with budget.work():
                    clock.seconds += OPEN_SECONDS
                clock.seconds += OUTSIDE_SECONDS
                schedule.opened(sender, OPEN_SECONDS)
                spread.opened.append(clock() - 1000.0)
                continue
            device.sends += 1
            with denials.work():
                clock.seconds += DENIAL_SECONDS
                told = schedule.wait_seconds(sender) if heeds else 0.0
            device.lost, wait = False, max(device.renews.next_seconds(), told)
        except WireError as error:
            assert error.reason == "busy"
            if not device.lost:
                spread.busy += 1
                wait = max(PACE.answer_seconds / 2, device.opens.next_seconds())
            elif device.sends == 1:
                wait = PACE.repeat_seconds * rng.uniform(1.0, 1.5)
            else:
                wait = max(PACE.answer_seconds, device.updates.next_seconds())
                if device.sends == PACE.unanswered_sends:
                    device.lost = False
                    wait += device.reopens.next_seconds()
        heapq.heappush(due, (at + wait, next(order), number))
    return spread


@pytest.mark.parametrize("seed", [1, 2])
def test_opens_are_spread_over_the_time_that_they_take(seed: int) -> None:
    least_seconds = DEVICES * OPEN_SECONDS / SHARE
    found = storm(heeds=True, seed=seed)
    assert len(found.opened) == DEVICES
    half, most = np.quantile(found.opened, (0.5, 0.95))
    assert half <= 0.7 * least_seconds and most <= 1.3 * least_seconds
    assert found.opened[-1] <= 1.4 * least_seconds
    assert found.busy <= DEVICES // 100
    # Without places the last ones come when their waits have grown.
    at_once = storm(heeds=False, seed=seed)
    assert at_once.opened[-1] > 1.5 * found.opened[-1] and at_once.busy > DEVICES // 4


@pytest.mark.parametrize("absent", [0.3, 0.9])
def test_those_who_do_not_come_keep_nobody_from_an_open_for_longer(absent: float) -> None:
    found = storm(heeds=True, seed=3, absent=absent)
    assert len(found.opened) == round((1 - absent) * DEVICES)
    assert found.opened[-1] <= 1.1 * DEVICES * OPEN_SECONDS / SHARE


def test_a_row_in_which_nobody_comes_is_short_for_who_asks_next() -> None:
    clock = Clock(100.0)
    schedule = OpenSchedule(SHARE, clock)
    for number in range(200):
        schedule.opened(b"%d" % number, 0.001)
        clock.seconds += 1.0
    row_seconds = max(schedule.wait_seconds(b"asleep %d" % number) for number in range(50_000))
    assert row_seconds > 120
    asked = [schedule.wait_seconds(b"honest 0")]
    for sweep in range(1, 7):
        clock.seconds += 10.0
        schedule.sweep()
        asked.append(schedule.wait_seconds(b"honest %d" % sweep))
    assert asked[0] > 120 and max(asked[4:]) < row_seconds / 5
    # Where they come again, the row is one again.
    for number in range(10_000):
        schedule.opened(b"%d" % number, 0.001)
        clock.seconds += 0.001 * 1.1 / SHARE
        if number % 3000 == 0:
            schedule.sweep()
    waits = [schedule.wait_seconds(b"new %d" % number) for number in range(10_000)]
    assert max(waits) > 0.8 * 10_000 * 0.001 * 1.1 / SHARE


def test_places_that_nobody_comes_for_end_the_stop_before_a_measurement() -> None:
    clock = Clock(100.0)
    schedule = OpenSchedule(SHARE, clock)
    refused = 0
    for second in range(600):
        clock.seconds += 1.0
        if second % 10 == 0:
            schedule.sweep()
        for number in range(64):
            try:
                schedule.wait_seconds(b"asleep %d" % number)
            except WireError:
                break
        try:
            schedule.wait_seconds(b"honest %d" % second)
        except WireError:
            refused += 1
    assert refused <= 31


@pytest.mark.parametrize("frozen_seconds", [0.5, 2.0, 60.0])
def test_a_process_that_stood_still_in_an_open_goes_on_at_once(frozen_seconds: float) -> None:
    clock = Clock(100.0)
    budget, schedule = WorkBudget(SHARE, clock), OpenSchedule(SHARE, clock)

    def opens(number: int, seconds: float) -> None:
        with budget.work():
            clock.seconds += seconds
        schedule.opened(b"%d" % number, seconds)

    for number in range(200):
        opens(number, 0.001)
        clock.seconds += 0.02
    before = schedule._cost_seconds
    opens(200, frozen_seconds)
    assert schedule._cost_seconds <= 1.16 * before
    clock.seconds += 1.0 / SHARE
    opens(201, 0.001)
