"""Who holds whose data, and how slow each class pretends to be."""

from __future__ import annotations

import tomllib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.fleet.plan import (
    CLASSES,
    HEADROOM,
    MEASURE_SECONDS,
    TIMED_PER_CLASS,
    budget_seconds,
    deadline_seconds,
    deal_users,
    plan_devices,
    slowdown,
)
from examples.fleet.recommender_task import FleetSettings, task_file


@given(st.lists(st.integers(1, 500), min_size=4, max_size=80), st.integers(1, 4))
def test_every_user_is_on_one_device_and_loads_are_even(counts: list[int], devices: int) -> None:
    dealt = deal_users(counts, devices)
    assert sorted(user for users in dealt for user in users) == list(range(len(counts)))
    loads = [sum(counts[user] for user in users) for users in dealt]
    # Whoever is heaviest was lightest before its last user came.
    assert max(loads) - min(loads) <= max(counts)


def test_every_process_holds_every_class() -> None:
    plan = plan_devices([10] * 943, 48, 4)
    assert len({device.name for device in plan}) == 48
    assert sum(len(device.users) for device in plan) == 943
    for process in range(4):
        held = [device.capacity for device in plan if device.process == process]
        assert {held.count(each.name) for each in CLASSES} == {3}


@pytest.mark.parametrize("bend", [0.0, 1e-6])
def test_a_class_affords_its_columns_and_not_the_next_classs(bend: float) -> None:
    def cost(k: float) -> float:
        return 2e-3 + 3e-5 * k + bend * k * k

    now = {k: cost(k) for k in (1, 16, 32, 48, 64, 96, 128)}
    budget = budget_seconds(now, 128)
    limit = budget * (1 - HEADROOM)
    factors = [slowdown(now, each.about_k, 128, budget) for each in CLASSES]
    for (each, stronger), factor in zip(pairwise(CLASSES), factors, strict=False):
        assert factor * cost(each.about_k) < limit
        assert factor * cost(stronger.about_k) > limit
    assert factors[-1] * cost(128) < limit


def test_the_first_round_has_time_for_all_that_time_themselves_in_it() -> None:
    few, many = (plan_devices([3] * devices, devices, 2) for devices in (8, 48))
    assert deadline_seconds(few) > 8 * MEASURE_SECONDS
    more = TIMED_PER_CLASS * len(CLASSES) - 8
    assert deadline_seconds(many) - deadline_seconds(few) == more * MEASURE_SECONDS


def test_the_task_file_holds_the_deadlines_of_the_plan() -> None:
    deadline = deadline_seconds(plan_devices([3] * 8, 8, 2))
    settings = FleetSettings(8, 4, 64, 0.01, deadline)
    found = tomllib.loads(task_file("mqtt://127.0.0.1:1", settings))["round"]
    assert found["deadline_seconds"] == deadline
    assert 5 < found["least_deadline_seconds"] < deadline
