"""Figures: the same as if one place had all the data, of enough devices, and hard to bend."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.evaluation import (
    DeviceReport,
    Figure,
    Rules,
    summarise,
)
from device_sdk.evaluation.metrics import METRICS, PredictionMetric, RankMetric
from device_sdk.evaluation.report import Evaluation, EvaluationReport, Stage

RULES = Rules(("accuracy", "auc", "log_loss"), least_devices=2)
RANKS = Rules(("hr10", "ndcg10"), least_devices=3, sample_cap=10.0)


def classified(output: np.ndarray, target: np.ndarray, stage: Stage = "global") -> EvaluationReport:
    found = []
    for name in RULES.metrics:
        metric = METRICS[name]
        assert isinstance(metric, PredictionMetric)
        found.append(Evaluation(stage, name, metric.measure(output, target, "probabilities")))
    return EvaluationReport(tuple(found))


def ranked(ranks: np.ndarray, stage: Stage = "global") -> EvaluationReport:
    found = []
    for name in RANKS.metrics:
        metric = METRICS[name]
        assert isinstance(metric, RankMetric)
        found.append(Evaluation(stage, name, metric.measure(ranks)))
    return EvaluationReport(tuple(found))


def one(figures: list[Figure], metric: str, stage: Stage = "global", part: str = "") -> Figure:
    (found,) = [
        each for each in figures if (each.metric, each.stage, each.part) == (metric, stage, part)
    ]
    return found


def hits(share: float, users: int) -> EvaluationReport:
    return ranked(np.where(np.arange(users) < round(share * users), 0, 50))


def test_twenty_devices_together_are_as_good_as_the_model_is_on_all_of_their_data() -> None:
    rng = np.random.default_rng(0)
    devices = []
    for size in rng.integers(20, 60, 20):
        target = rng.integers(0, 2, size)
        devices.append((np.clip(target * 0.3 + rng.random(size) * 0.7, 0, 1), target))
    reports = [DeviceReport("", classified(*each)) for each in devices]
    figures = summarise(reports, RULES)
    output, target = (np.concatenate(each) for each in zip(*devices, strict=True))
    for name in RULES.metrics:
        figure, metric = one(figures, name), METRICS[name]
        assert isinstance(metric, PredictionMetric)
        central = metric.value(metric.measure(output, target, "probabilities"))
        assert figure.value == pytest.approx(central, rel=1e-12)
        assert (figure.devices, figure.samples, figure.capped) == (20, len(target), 0)
        own = [metric.value(metric.measure(*each, "probabilities")) for each in devices]
        assert figure.median == np.median(own)
        assert figure.deciles == tuple(np.percentile(own, range(10, 100, 10)))
    worst = one(figures, "accuracy").worst_tenth
    assert worst is not None and worst < one(figures, "accuracy").median
    worst = one(figures, "log_loss").worst_tenth  # of which less is better
    assert worst is not None and worst > one(figures, "log_loss").median


def test_one_liar_of_twenty_moves_the_figure_by_its_capped_share_and_the_median_not() -> None:
    rules = replace(RANKS, least_devices=2)
    honest = [DeviceReport("", hits(0.3, 10)) for _ in range(19)]
    modest = one(summarise([*honest, DeviceReport("", hits(1.0, 10))], rules), "hr10")
    assert modest.value == pytest.approx((19 * 3 + 10) / 200)
    boastful = EvaluationReport(
        (Evaluation("global", "hr10", np.array([2.0**31 - 1, 2.0**31 - 1])),)
    )
    bent = one(summarise([*honest, DeviceReport("", boastful)], rules), "hr10")
    assert bent.capped == 1
    assert bent.samples == pytest.approx(19 * 10 + 100)
    assert bent.value == pytest.approx((19 * 3 + 100) / 290)
    # What says that something is odd: half of the devices and more stand at 0.3.
    assert bent.median == modest.median == 0.3
    assert bent.worst_tenth == pytest.approx(0.3)


def test_a_loss_without_bounds_is_held_to_what_is_usual_before_it_is_added() -> None:
    rules = Rules(("rmse",), least_devices=2, sample_cap=10.0)

    def said(samples: float, squares: float) -> DeviceReport:
        found = Evaluation("global", "rmse", np.array([samples, squares]))
        return DeviceReport("", EvaluationReport((found,)))

    honest = [said(10.0, 40.0) for _ in range(19)]
    (figure,) = summarise([*honest, said(2.0**31 - 1, 1e24 * (2.0**31 - 1))], rules)
    assert 2.0 < figure.value < 6.0 and (figure.capped, figure.typical) == (1, 2.0)
    assert figure.median == 2.0
    assert figure.worst_tenth == 2.0


def test_a_figure_of_too_few_devices_is_none() -> None:
    reports = [DeviceReport("", hits(0.5, 10)) for _ in range(2)]
    assert summarise(reports, RANKS) == []
    assert len(summarise([*reports, DeviceReport("", hits(0.5, 10))], RANKS)) == 2
    # A device of too few samples counts as none.
    rules = Rules(RANKS.metrics, least_devices=3, least_samples=5)
    assert summarise([*reports, DeviceReport("", hits(0.5, 4))], rules) == []


def test_metrics_that_nobody_asked_for_are_left_out() -> None:
    reports = [DeviceReport("", hits(0.5, 10)) for _ in range(3)]
    assert [each.metric for each in summarise(reports, Rules(("ndcg10",), 3))] == ["ndcg10"]
    assert summarise(reports, Rules(("loss",), 3)) == []


@pytest.mark.parametrize("least", [1, 3])
def test_halves_and_tenths_are_of_enough_devices(least: int) -> None:
    rules = replace(RANKS, least_devices=least)

    def figure(devices: int) -> Figure:
        said = [DeviceReport("", hits(each % 10 / 10, 10)) for each in range(devices)]
        return one(summarise(said, rules), "hr10")

    assert math.isnan(figure(2 * least - 1).median)
    assert not math.isnan(figure(2 * least).median)
    assert figure(10 * least - 1).worst_tenth is None
    enough = figure(10 * least)
    assert enough.worst_tenth == pytest.approx(0.09)
    assert len(enough.deciles) == 9


def test_stages_and_parts_have_figures_of_their_own() -> None:
    small = [DeviceReport("k=4", hits(0.2, 10)) for _ in range(4)]
    large = [
        DeviceReport("k=8", EvaluationReport((*hits(0.6, 10).results, *personal)))
        for personal in [ranked(np.zeros(10, np.int64), "personal").results] * 6
    ]
    figures = summarise([*small, *large], RANKS)
    assert one(figures, "hr10").value == pytest.approx(0.44)
    assert one(figures, "hr10", part="k=4").value == pytest.approx(0.2)
    assert one(figures, "hr10", part="k=8").value == pytest.approx(0.6)
    assert one(figures, "hr10", "personal").devices == 6
    # All of the devices behind it are of one part: to say so twice is of no use.
    assert not [each for each in figures if each.stage == "personal" and each.part]


def test_no_part_is_left_that_subtraction_would_give() -> None:
    of = {"k=4": 2, "k=8": 4, "k=16": 9}
    reports = [
        DeviceReport(part, hits(0.5, 10)) for part, count in of.items() for _ in range(count)
    ]
    parts = {each.part for each in summarise(reports, RANKS)}
    assert parts == {"", "k=16"}  # with k=8, the two of k=4 would follow


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), max_size=30), st.integers(1, 5))
def test_shown_parts_leave_nobody_or_enough(parts: list[str], least: int) -> None:
    rules = Rules(("hr10",), least_devices=least)
    figures = summarise([DeviceReport(part, hits(0.5, 2)) for part in parts], rules)
    assert (len(figures) == 0) is (len(parts) < least)
    shown = [each for each in figures if each.part]
    assert all(each.devices >= least for each in figures)
    rest = len(parts) - sum(each.devices for each in shown)
    assert not shown or rest == 0 or rest >= least


def test_a_metric_that_one_device_s_data_does_not_define_counts_in_the_sum_alone() -> None:
    rules = Rules(("auc",), least_devices=3)
    metric = METRICS["auc"]
    assert isinstance(metric, PredictionMetric)

    def said(output: list[float], target: list[int]) -> DeviceReport:
        statistics = metric.measure(np.array(output), np.array(target), "probabilities")
        return DeviceReport("", EvaluationReport((Evaluation("global", "auc", statistics),)))

    alone = [said([0.2], [0]), said([0.9], [1]), said([0.8], [1])]
    (figure,) = summarise(alone, rules)
    assert figure.value == 1.0
    assert math.isnan(figure.median)
    assert figure.deciles == ()
