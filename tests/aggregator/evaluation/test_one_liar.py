"""One device that lies about a version chooses neither the best one nor when a task stops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.evaluation import DeviceReport, Evaluated, Figure, Rules, stalled_since, summarise
from device_sdk.evaluation.metrics import METRICS
from device_sdk.evaluation.report import Evaluation, EvaluationReport

LOSSES = [2.3 * 0.93**version for version in range(1, 61)]
SHARES = [0.9 - 0.8 * 0.93**version for version in range(1, 61)]
LOWEST, HIGHEST = [3e9, -1e12 * 3e9], [3e9, 1e12 * 3e9]
ALL_RIGHT = [3e9, 3e9]


def figure(metric: str, truth: float, lie: list[float] | None, devices: int, seed: int) -> Figure:
    """Of a fleet whose first device may lie, under the rules that a task has by default."""
    rng, reports = np.random.default_rng(seed), []
    for place in range(devices):
        own = 30 * (truth + 0.05 * rng.standard_normal())
        found = np.array([30.0, own if metric == "loss" else float(rng.binomial(30, truth))])
        if place == 0 and lie is not None:
            found = np.array(lie)
        METRICS[metric].check(found)
        reports.append(DeviceReport("", EvaluationReport((Evaluation("global", metric, found),))))
    (whole,) = summarise(reports, Rules((metric,), 3, 1, 10.0))
    return whole


@pytest.mark.parametrize("liar", [2, 30])
@pytest.mark.parametrize(
    ("metric", "curve", "lie", "devices"),
    [
        ("loss", LOSSES, LOWEST, 5),
        ("loss", LOSSES, HIGHEST, 5),
        ("loss", LOSSES, LOWEST, 20),
        ("loss", LOSSES, HIGHEST, 20),
        # Of fewer than two times least_devices nobody's own values are compared.
        ("accuracy", SHARES, ALL_RIGHT, 20),
        ("accuracy", SHARES, [3e9, 0.0], 20),
    ],
)
def test_the_best_version_is_as_good_as_without_the_liar_and_rounds_go_on(
    metric: str, curve: list[float], lie: list[float], devices: int, liar: int
) -> None:
    higher = metric == "accuracy"
    history: list[Evaluated] = []
    for version, truth in enumerate(curve, 1):
        found = figure(metric, truth, lie if version == liar else None, devices, version)
        history.append(Evaluated(version, version, found.comparable))
        assert not stalled_since(
            history, higher_is_better=higher, most_rounds=25, least_improvement=0.0
        )
    best = (max if higher else min)(history, key=lambda each: each.value)
    assert curve[best.version - 1] == pytest.approx(curve[-1], abs=0.03)


@settings(max_examples=100, deadline=None)
@given(st.integers(3, 5), st.integers(0, 99), st.floats(0, 1), st.integers(1, 2**40))
def test_of_too_few_devices_for_that_one_that_lies_is_one_of_them(
    devices: int, seed: int, share: float, samples: int
) -> None:
    lie = [float(samples), float(round(share * samples))]
    found = figure("accuracy", 0.5, lie, devices, seed)
    honest = figure("accuracy", 0.5, None, devices, seed)
    assert abs(found.comparable - honest.comparable) <= 1 / devices + 1e-9
    assert np.isnan(found.median), "nor is it a device's own value"


@settings(max_examples=100, deadline=None)
@given(st.integers(6, 40), st.integers(0, 99), st.floats(-1e12, 1e12), st.integers(1, 2**40))
def test_what_versions_are_compared_by_stays_among_what_the_others_say(
    devices: int, seed: int, mean: float, samples: int
) -> None:
    lie = [float(samples), mean * samples]
    found = figure("loss", 1.0, lie, devices, seed)
    others = [30 * (1.0 + 0.05 * each) / 30 for each in _draws(devices, seed)][1:]
    assert min(others) - 1e-9 <= found.comparable <= max(others) + 1e-9
    # The figure itself: a device's mean is held to what is usual before it is added.
    assert abs(found.value - 1.0) < 2.0


def _draws(devices: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return [float(rng.standard_normal()) for _ in range(devices)]


def test_who_says_what_no_other_does_is_counted_among_the_capped() -> None:
    assert figure("loss", 1.0, None, 20, 0).capped == 0
    assert figure("loss", 1.0, [30.0, -30e12], 20, 0).capped == 1
    assert figure("loss", 1.0, [30.0, -30e12], 2 + 1, 0).capped == 1


def test_hits_of_devices_of_one_user_each_tell_versions_apart() -> None:
    found = []
    for hits in (8, 9, 10, 11):
        reports = [
            DeviceReport(
                "",
                EvaluationReport((Evaluation("global", "hr10", np.array([1.0, each < hits])),)),
            )
            for each in range(40)
        ]
        (whole,) = summarise(reports, Rules(("hr10",), 3, 1, 10.0))
        found.append(whole.comparable)
    assert found == sorted(set(found))
