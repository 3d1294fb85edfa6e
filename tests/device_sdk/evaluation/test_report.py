"""What a device found out survives its bytes, and no bytes say what no data could give."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.evaluation.metrics import METRICS, PredictionMetric, RankMetric
from device_sdk.evaluation.report import (
    Evaluation,
    EvaluationReport,
    EvaluationTerms,
    PackedReport,
    read_evaluations,
    write_evaluations,
)
from device_sdk.fields import plain
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode_value
from device_sdk.wire.publish.manifest import evaluates, selected
from tests.fakes.refusals import reason_of
from tests.vectors import generate_evaluation as vectors
from tests.vectors.generate_codecs import MANIFEST

FILE = json.loads(vectors.FILE.read_text(encoding="utf-8"))


def some_report(count: int, seed: int, stages: Any = ("global",)) -> EvaluationReport:
    """Every metric of so many random samples and users."""
    rng = np.random.default_rng(seed)
    likely, target = rng.random(count), rng.integers(2, size=count)
    found = []
    for stage in stages:
        for name, metric in METRICS.items():
            if isinstance(metric, PredictionMetric):
                statistics = metric.measure(likely, target, "probabilities")
            elif isinstance(metric, RankMetric):
                statistics = metric.measure(rng.integers(30, size=count))
            else:
                statistics = np.array([count, rng.standard_normal() * count])
            found.append(Evaluation(stage, name, statistics))
    return EvaluationReport(tuple(found))


def as_data(report: EvaluationReport) -> Any:
    return [(e.stage, e.metric, e.statistics.tolist()) for e in report.results], report.reason


def test_the_vectors_are_what_the_code_writes_and_reads() -> None:
    assert vectors.FILE.read_text(encoding="utf-8") == vectors.text()
    report = read_evaluations(bytes.fromhex(FILE["report"]["encoding"]))
    assert report.reason == FILE["report"]["reason"]
    assert len(report.results) == len(FILE["report"]["results"])
    for found, written in zip(report.results, FILE["report"]["results"], strict=True):
        assert (found.stage, found.metric) == (written["stage"], written["metric"])
        assert found.value == pytest.approx(written["value"], abs=1e-15)
        places = np.flatnonzero(found.statistics)
        assert {str(p): float(found.statistics[p]) for p in places} == written["statistics"]
    assert read_evaluations(bytes.fromhex(FILE["empty_report"])).results == ()
    terms = cbor.decode(bytes.fromhex(FILE["terms"]["encoding"]), limit_bytes=4096)
    assert decode_value(EvaluationTerms, terms) == vectors.TERMS


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32), st.sampled_from(["", "out-of-time"]))
def test_what_is_written_is_read(count: int, seed: int, reason: str) -> None:
    report = EvaluationReport(some_report(count, seed).results, reason)
    data = write_evaluations(report)
    again = read_evaluations(data)
    assert as_data(again) == as_data(report)
    assert write_evaluations(again) == data


def test_both_stages_of_every_metric_fit_four_kibibytes() -> None:
    """With samples in every bin of both histograms, and counts of two bytes."""
    report = some_report(150_000, 0, ("global", "personal"))
    auc = report.of("personal", "auc")
    assert auc is not None and np.count_nonzero(auc.statistics) == auc.statistics.size
    assert len(write_evaluations(report)) <= PackedReport.MOST_BYTES


def test_few_samples_make_few_bytes() -> None:
    assert len(write_evaluations(some_report(20, 0))) < 600
    only = EvaluationReport(some_report(20, 0).results[:1])
    assert only.results[0].metric == "accuracy"
    assert len(write_evaluations(only)) < 40


def test_what_weighs_less_has_the_same_figure() -> None:
    for each in some_report(40, 5).results:
        small = replace(each, statistics=each.statistics / 16)
        assert small.samples == pytest.approx(2.5)
        assert small.value == pytest.approx(each.value, nan_ok=True)


def test_counts_that_are_not_whole_are_not_written() -> None:
    (first, *_) = some_report(40, 5).results
    half = replace(first, statistics=first.statistics / 16)
    with pytest.raises(ValueError, match="whole"):
        write_evaluations(EvaluationReport((half,)))


def test_a_report_is_of_the_same_samples_throughout() -> None:
    loss = Evaluation("global", "loss", np.array([4.0, 1.0]))
    accuracy = Evaluation("global", "accuracy", np.array([5.0, 1.0]))
    with pytest.raises(ValueError, match="is of"):
        EvaluationReport((loss, accuracy))
    with pytest.raises(ValueError, match="twice"):
        EvaluationReport((loss, loss))
    users = Evaluation("global", "hr10", np.array([2.0, 1.0]))
    own = Evaluation("personal", "accuracy", np.array([5.0, 1.0]))
    report = EvaluationReport((own, users, loss))
    assert [each.metric for each in report.results] == ["hr10", "loss", "accuracy"]
    assert report.of("personal", "accuracy") is own
    assert report.of("personal", "loss") is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"global": {}}, "bad-field"),
        ({"global": {"loss": "text"}}, "bad-field"),
        ({"global": {"f1": b"\x00"}}, "bad-field"),
        ({"reason": ""}, "bad-field"),
        ({"reason": "Not A Slug"}, "bad-name"),
        ({"else": 1}, "wrong-fields"),
        ([], "wrong-fields"),
        ({"global": {"accuracy": b"\x02\x00\x04\x00\x05"}}, "bad-statistics"),
        ({"global": {"accuracy": b"\x02\x00\x04\x00\x00"}}, "bad-rows"),
        ({"global": {"accuracy": b"\x03\x00\x04\x00\x05\x00\x05"}}, "bad-rows"),
        ({"global": {"accuracy": b"\x01\x02\x04"}}, "bad-rows"),
        ({"global": {"accuracy": b"\x01\x00\x04\x00"}}, "truncated"),
        ({"global": {"accuracy": b"\x00"}}, "bad-statistics"),
        ({"global": {"loss": b"\x01\x00\x04" + struct.pack("<d", math.nan)}}, "bad-field"),
        ({"global": {"loss": b"\x01\x00\x04" + struct.pack("<d", -0.0)}}, "bad-field"),
        ({"global": {"loss": b"\x01\x00\x04" + struct.pack("<d", 1e14)}}, "bad-statistics"),
        (
            {"global": {"accuracy": b"\x01\x00\x04", "loss": b"\x01\x00\x05" + bytes(8)}},
            "bad-statistics",
        ),
    ],
)
def test_bytes_that_no_device_writes_are_refused(value: Any, reason: str) -> None:
    assert reason_of(read_evaluations, cbor.encode(value)) == reason


def test_terms_survive_their_bytes_and_bad_ones_are_refused() -> None:
    terms = EvaluationTerms(("hr10", "a.metric-of-tomorrow"), 5, 0.125, 3, 0.5)
    assert decode_value(EvaluationTerms, plain(terms)) == terms
    with pytest.raises(WireError):
        decode_value(EvaluationTerms, {**plain(terms), "metrics": [1]})
    for wrong in (
        {"metrics": ()},
        {"metrics": ("loss", "loss")},
        {"metrics": ("Loss",)},
        {"share": 0.0},
        {"share": 1.5},
        {"every_rounds": 0},
        {"time_share": math.nan},
        {"least_samples": 0},
    ):
        fields: Any = {"metrics": ("loss",), **wrong}
        with pytest.raises(ValueError):
            EvaluationTerms(**fields)


def test_a_share_of_devices_evaluates_in_some_rounds_and_others_train() -> None:
    """Apart from selection: who is drawn for one is not for that reason drawn for the other."""
    terms = EvaluationTerms(("loss",), every_rounds=2, share=0.25)
    devices = [struct.pack("<QQ", number, 7) for number in range(4000)]
    drawn = {device for device in devices if evaluates(MANIFEST, terms, device)}
    assert MANIFEST.round % 2 == 0
    assert 0.22 < len(drawn) / 4000 < 0.28
    half = 2**63
    seed, task, number = MANIFEST.sampling_seed, MANIFEST.task, MANIFEST.round
    both = sum(selected(seed, half, task, number, device) for device in drawn)
    assert 0.4 < both / len(drawn) < 0.6
    never = EvaluationTerms(("loss",), every_rounds=3)
    assert not any(evaluates(MANIFEST, never, device) for device in devices[:50])
    everyone = EvaluationTerms(("loss",))
    assert all(evaluates(MANIFEST, everyone, device) for device in devices[:50])


def test_the_page_says_what_a_report_takes() -> None:
    page = (Path(__file__).parents[3] / "docs/evaluation.md").read_text(encoding="utf-8")
    names = ("accuracy", "loss", "log_loss", "calibration", "auc")
    head = ("held-out samples", *names, "all five", "both stages")
    lines = [f"| {' | '.join(head)} |"]
    lines.append("|---" * 8 + "|")
    for count in (20, 200, 2000, 20_000):
        rng = np.random.default_rng(0)
        likely = rng.random(count).astype(np.float32)
        right = (rng.random(count) < likely).astype(np.int64)
        both = np.stack([1 - likely, likely], axis=1)
        results = []
        for name in names:
            metric = METRICS[name]
            if isinstance(metric, PredictionMetric):
                found = metric.measure(both, right, "probabilities")
            else:
                found = np.array([count, 0.5 * count])
            results.append(Evaluation("global", name, found))
        own = [replace(each, stage="personal") for each in results]
        reports = [*([each] for each in results), results, results + own]
        sizes = [len(write_evaluations(EvaluationReport(tuple(each)))) for each in reports]
        lines.append(f"| {' | '.join(f'{each:,}' for each in (count, *sizes))} |")
    assert "\n".join(lines) in page
