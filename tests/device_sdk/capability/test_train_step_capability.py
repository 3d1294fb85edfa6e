"""Choosing k on the real train step, in ways that a busy machine cannot upset."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from device_sdk.artifact.errors import ArtifactError
from device_sdk.capability import Request, WorkSizes, bench_stepped
from device_sdk.capability.bench import TrainStepWorkload
from device_sdk.capability.report import BenchChoice, BenchResult, shown
from device_sdk.factorisation import packaged_artifact
from device_sdk.runtime import providers
from tests.fakes.handmade import linear_artifact
from tests.fakes.odd_provider import ODD, offer_odd_provider
from tests.fakes.waiting import PATIENCE_SECONDS


def bench(deadline_seconds: float, **options: float) -> tuple[BenchResult, BenchChoice]:
    request = Request(deadline_seconds, **{"time_box_seconds": 60.0, **options})
    result = bench_stepped(packaged_artifact(), request, WorkSizes(300, 500), 16)
    assert result.choice is not None
    return result, result.choice


def test_a_generous_deadline_takes_every_dimension_as_the_report_says() -> None:
    result, choice = bench(30.0)
    assert (choice.option, choice.fits, choice.confirmed) == ("16", True, True)
    winner = result.rows[-1]
    assert winner.p50_seconds is not None and winner.p90_seconds is not None
    assert winner.option == "16" and 0.0 < winner.p50_seconds <= winner.p90_seconds
    assert winner.runs >= 8
    assert result.machine.provider.endswith("ExecutionProvider")
    report = json.loads(result.to_json())
    assert report["chosen"] == "16"
    assert report["rows"][0]["option"] == "1" and report["rows"][0]["samples_a_second"] > 0
    assert report["machine"]["threads"] == 1
    text = shown(result)
    assert "Chosen: k = 16." in text and result.machine.cpu_model in text
    assert "16 *" in text


def test_a_hopeless_deadline_takes_one_and_says_so() -> None:
    _, choice = bench(1e-7)
    assert (choice.option, choice.fits) == ("1", False)
    assert "Even the smallest misses: k = 1" in choice.reason


def test_a_throttled_device_takes_a_smaller_k_and_says_so() -> None:
    # The deadline is far above a step here and far below a thousand of them.
    step = bench(30.0)[0].rows[0].p50_seconds
    assert step is not None
    start = time.perf_counter()
    (quick, fast), (emulated, slow) = bench(step * 100.0), bench(step * 100.0, slowdown=1000.0)
    assert time.perf_counter() - start < PATIENCE_SECONDS
    assert fast.fits and not slow.fits
    assert int(slow.option or 0) < int(fast.option or 0)
    assert "EMULATED" in shown(emulated) and "EMULATED" not in shown(quick)
    assert emulated.slowdown == 1000.0


def test_the_epoch_is_split_into_batches() -> None:
    work = TrainStepWorkload(
        packaged_artifact(),
        WorkSizes(50, 100, users=3, batch=30),
        providers="cpu",
        threads=1,
        rng=np.random.default_rng(0),
    )
    work.prepare(4)
    work.run()
    assert work._trainer.step_count == 4
    assert work._trainer.axes == {"users": 3, "items": 50, "k": 4}
    work.prepare(7, share=0.1)
    work.run()
    assert work._trainer.step_count == 5
    assert work._trainer.axes["k"] == 7


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    right = {"items": 5, "interactions": 5, "users": 1, "batch": 1}
    for wrong in right:
        with pytest.raises(ValueError, match=f"{wrong} is 0"):
            WorkSizes(**{**right, wrong: 0})
    linear_artifact(tmp_path)
    with pytest.raises(ArtifactError, match="is no matrix factorisation"):
        bench_stepped(tmp_path, Request(1.0), WorkSizes(5, 5), 8)


def test_the_cpu_and_an_accelerator_are_both_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(array: np.ndarray) -> None:
        time.sleep(0.0005)

    offer_odd_provider(monkeypatch, slow)
    monkeypatch.setattr(providers, "candidates", lambda asked: (ODD, providers.CPU))
    result = bench_stepped(
        packaged_artifact(), Request(60.0, time_box_seconds=2.0), WorkSizes(50, 40), 4
    )
    choice = result.choice
    assert choice is not None and choice.option == "4"
    assert result.machine.provider == "CPUExecutionProvider"
    assert "With OddExecutionProvider instead: " in choice.reason
    assert "OddExecutionProvider: two steps' change of" in choice.reason
