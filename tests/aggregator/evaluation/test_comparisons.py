"""What devices with a second model say of federation: of many, honestly, and of no single one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.evaluation import (
    FLEET,
    DeviceReport,
    Figure,
    Rules,
    compared,
    summarise,
    what_it_brings,
)
from device_sdk.evaluation.report import STAGES, Evaluation, EvaluationReport, Stage

ROWS = 20
RULES = Rules(("accuracy",), least_devices=3)
Hits = dict[Stage, int]
STAGE_SETS: list[tuple[Stage, ...]] = [
    tuple(stage for stage, there in zip(STAGES, each, strict=True) if there)
    for each in product((True, False), repeat=3)
    if any(each)
]


def device(part: str = "", rows: int = ROWS, **right: int) -> DeviceReport:
    """One that was right on so many of its rows in each stage that is named."""
    stages: dict[str, Stage] = {"shared": "global", "personal": "personal", "alone": "alone"}
    found = [
        Evaluation(stages[name], "accuracy", np.array([rows, each], dtype=np.float64))
        for name, each in right.items()
    ]
    return DeviceReport(part, EvaluationReport(tuple(found)))


def figures(devices: Sequence[DeviceReport]) -> dict[tuple[Stage, str], Figure]:
    return {(each.stage, each.part): each for each in summarise(devices, RULES)}


def test_who_is_compared_are_all_who_have_both() -> None:
    fleet = [device(shared=12, personal=14, alone=11 + n % 2) for n in range(6)]
    fleet += [device(shared=12, personal=14) for _ in range(4)]
    found = figures(fleet)
    assert found["personal", FLEET].over_alone == pytest.approx(2.5 / ROWS)
    assert found["global", FLEET].over_alone == pytest.approx(0.5 / ROWS)
    assert found["personal", FLEET].over_received == pytest.approx(2 / ROWS)
    assert found["personal", FLEET].control_devices == 6
    assert found["personal", FLEET].over_alone_half_width > 0


@pytest.mark.parametrize("others", [1, 2])
def test_who_is_not_of_the_arm_is_not_found_by_subtraction(others: int) -> None:
    fleet = [device(shared=9, personal=10 + n % 3, alone=8 + n % 2) for n in range(9)]
    fleet += [device(shared=9, personal=17) for _ in range(others)]
    found = figures(fleet)
    personal, alone = found["personal", FLEET], found["alone", FLEET]
    # The arm's sum by the comparison, and with it what is left of the fleet's.
    arm = personal.control_devices * (personal.over_alone + alone.value)
    rest = personal.devices * personal.value - arm
    assert rest != pytest.approx(others * 17 / ROWS)
    assert personal.devices - personal.control_devices >= RULES.least_devices


def test_who_has_no_model_of_its_own_is_not_found_by_subtraction() -> None:
    fleet = [device(shared=8 + n % 3, personal=10 + n % 4) for n in range(9)]
    found = figures([*fleet, device(shared=17)])
    shared, personal = found["global", FLEET], found["personal", FLEET]
    both = len(fleet) * (personal.value - personal.over_received)
    assert shared.devices * shared.value - both != pytest.approx(17 / ROWS)


def test_a_part_s_one_device_of_the_arm_is_not_found_by_subtraction() -> None:
    fleet = [device("a", shared=9, personal=12 + n, alone=9) for n in range(3)]
    fleet += [device("a", shared=9, personal=12) for _ in range(3)]
    fleet += [device("b", shared=9, personal=19, alone=2)]
    fleet += [device("b", shared=9, personal=12) for _ in range(3)]
    found = figures(fleet)
    assert found["personal", "a"].control_devices == found["alone", FLEET].devices == 3
    assert found["personal", FLEET].over_alone == found["personal", "a"].over_alone
    assert found["personal", "b"].devices == 4 and np.isnan(found["personal", "b"].over_alone)


def test_how_long_the_arm_has_trained_is_said_with_what_federation_brings() -> None:
    fleet = [device(shared=9, personal=12 + n % 3, alone=9) for n in range(5)]
    fleet = [replace(each, report=replace(each.report, rounds=2)) for each in fleet]
    lies = replace(fleet[0], report=replace(fleet[0].report, rounds=2**31 - 1))
    said = what_it_brings(summarise([*fleet[1:], lies], RULES))
    assert said.startswith("federation brings ")
    assert said.endswith("against the same devices alone, 5 devices after 2 rounds alone")


def test_too_few_others_are_told_of_as_such() -> None:
    fleet = [device(shared=9, personal=10 + n % 3, alone=8) for n in range(3)]
    found = summarise([*fleet, device(shared=9, personal=12)], RULES)
    said = what_it_brings(found)
    assert "3 of the control arm's devices evaluated this version, too few" in said
    assert "1.0 no others" in said


def test_what_too_few_rows_say_is_not_compared() -> None:
    rules = Rules(("accuracy",), least_devices=3, least_samples=10)
    fleet = [device(shared=9, personal=12, alone=9) for _ in range(4)]
    few = Evaluation("alone", "accuracy", np.array([1.0, 1.0]))
    one = device(shared=9, personal=12).report.results
    fleet += [DeviceReport("", EvaluationReport((*one, few))) for _ in range(4)]
    found = compared(summarise(fleet, rules), "accuracy")
    assert found is not None and found.control_devices == 4


VALUES = ("value", "over_alone", "over_received")


@given(st.lists(st.tuples(st.sampled_from(STAGE_SETS), st.sampled_from("abc")), max_size=24))
@settings(max_examples=150, deadline=None)
def test_no_device_s_value_follows_from_all_that_is_told(
    fleet: list[tuple[tuple[Stage, ...], str]],
) -> None:
    """Each mean is a row of an equation system in the devices' values, which decides none."""
    rng, names = np.random.default_rng(len(fleet)), {"global": "shared"}
    right = {
        (n, stage): int(rng.integers(0, ROWS))
        for n, (stages, _) in enumerate(fleet)
        for stage in stages
    }

    def told() -> np.ndarray:
        reports = [
            device(part, **{names.get(each, each): right[n, each] for each in stages})
            for n, (stages, part) in enumerate(fleet)
        ]
        found = [getattr(each, name) for each in summarise(reports, RULES) for name in VALUES]
        return np.array(found)

    before = told()
    system = np.zeros((len(before), len(right)))
    for place, key in enumerate(right):
        right[key] += 1
        system[:, place] = told() - before
        right[key] -= 1
    system = np.nan_to_num(system)
    for place, key in enumerate(right):
        one = np.eye(len(right))[place]
        left = one - system.T @ np.linalg.lstsq(system.T, one, rcond=None)[0]
        assert np.abs(left).max() > 1e-6, f"{key} is decided"
