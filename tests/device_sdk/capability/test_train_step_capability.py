"""Choosing k on the real train step, in ways that a busy machine cannot upset."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from device_sdk.artifact.errors import ArtifactError
from device_sdk.capability import Choice, Request, WorkSizes, choose_latent_dimension
from device_sdk.capability.bench import TrainStepWorkload
from device_sdk.capability.report import shown
from device_sdk.cli.bench import of_choice
from device_sdk.factorisation import packaged_artifact
from device_sdk.runtime import providers
from tests.fakes.handmade import linear_artifact
from tests.fakes.odd_provider import ODD, offer_odd_provider
from tests.fakes.waiting import PATIENCE_SECONDS


def choose(deadline_seconds: float, **options: float) -> Choice:
    request = Request(deadline_seconds, **{"max_k": 16, "time_box_seconds": 60.0, **options})  # type: ignore[arg-type]
    return choose_latent_dimension(packaged_artifact(), request, WorkSizes(300, 500))


def test_a_generous_deadline_takes_every_dimension_as_the_report_says() -> None:
    choice = choose(30.0)
    assert (choice.k, choice.fits, choice.confirmed) == (16, True, True)
    winner = choice.at(16)
    assert winner.p90_seconds is not None
    assert winner.median_seconds is not None
    assert 0.0 < winner.median_seconds <= winner.p90_seconds
    assert winner.cold_start_seconds > 0.0
    assert winner.runs >= 8
    assert choice.machine.provider.endswith("ExecutionProvider")
    assert choice.load_seconds > 0.0
    report = json.loads(of_choice(choice, "an epoch", 500).to_json())
    assert report["chosen"] == "16"
    assert report["rows"][0]["option"] == "1" and report["rows"][0]["samples_a_second"] > 0
    assert report["machine"]["threads"] == 1
    text = shown(of_choice(choice, "an epoch", 500))
    assert "Chosen: k = 16." in text
    assert choice.machine is not None and choice.machine.cpu_model in text
    assert "16 *" in text


def test_a_hopeless_deadline_takes_one_and_says_so() -> None:
    choice = choose(1e-7)
    assert (choice.k, choice.fits) == (1, False)
    assert "Even k = 1 misses" in choice.reason


def test_a_throttled_device_takes_a_smaller_k_and_says_so() -> None:
    # The deadline is far above a step here and far below a thousand of them.
    step = choose(30.0).at(1)
    assert step.median_seconds is not None
    deadline = step.median_seconds * 100.0
    fast, slow = choose(deadline), choose(deadline, slowdown=1000.0)
    assert fast.fits
    assert slow.k is not None
    assert fast.k is not None
    assert slow.k < fast.k
    assert not slow.fits
    assert "EMULATED" in shown(of_choice(slow, "an epoch", 500))
    assert "EMULATED" not in shown(of_choice(fast, "an epoch", 500))
    assert of_choice(slow, "an epoch", 500).slowdown == 1000.0


def test_a_step_that_outlasts_the_box_ends_with_it() -> None:
    start = time.perf_counter()
    choice = choose(1.0, slowdown=1e9, time_box_seconds=0.5)
    assert time.perf_counter() - start < PATIENCE_SECONDS  # a step would take hours
    assert (choice.k, choice.fits) == (1, False)
    assert "time box" in choice.reason


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
        choose_latent_dimension(tmp_path, Request(1.0), WorkSizes(5, 5))


def test_the_cpu_and_an_accelerator_are_both_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(array: np.ndarray) -> None:
        time.sleep(0.0005)

    offer_odd_provider(monkeypatch, slow)
    monkeypatch.setattr(providers, "candidates", lambda asked: (ODD, providers.CPU))
    choice = choose_latent_dimension(
        packaged_artifact(),
        Request(60.0, max_k=4, time_box_seconds=2.0),
        WorkSizes(50, 40),
    )
    assert choice.k == 4
    assert choice.machine is not None and choice.machine.provider == "CPUExecutionProvider"
    assert "With OddExecutionProvider instead: " in choice.reason
    assert "OddExecutionProvider: two steps' change of" in choice.reason
    assert choice.request.time_box_seconds == 2.0
