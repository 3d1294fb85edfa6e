"""Artifacts that do harm, each in a process of its own: it ends, and the words say what it did."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from device_sdk.factorisation import packaged_artifact
from device_sdk.trial import PASSED, TrialLimits, can_try, try_artifact
from device_sdk.wire.publish.report import Reason
from tests.fakes.bombs import Bomb, make_bomb
from tests.fakes.handmade import linear_artifact

GIB = 2**30


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial") / "linear"
    linear_artifact(folder)
    return folder


def test_artifacts_that_do_no_harm_pass(linear: Path) -> None:
    for folder in (linear, packaged_artifact()):
        assert try_artifact(folder, TrialLimits(60.0, GIB)) == PASSED


@pytest.mark.parametrize(
    ("kind", "limits", "reason", "words"),
    [
        ("loop", TrialLimits(1.0), Reason.STEP_TOO_LONG, "a step did not end within 1 s"),
        ("kernel", TrialLimits(1.0), Reason.STEP_TOO_LONG, "a step did not end within 1 s"),
        ("constants", TrialLimits(1.0), Reason.STEP_TOO_LONG, "a step did not end within 1 s"),
        ("memory", TrialLimits(60.0, GIB), Reason.OUT_OF_MEMORY, "(1,024 MiB)"),
        pytest.param(
            "crash",
            TrialLimits(60.0, GIB),
            Reason.CRASHED,
            "ended the process by SIGFPE",
            marks=pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's"),
        ),
    ],
)
def test_a_bomb_is_ended_and_named(
    linear: Path, tmp_path: Path, kind: Bomb, limits: TrialLimits, reason: Reason, words: str
) -> None:
    result = try_artifact(make_bomb(kind, linear, tmp_path / kind), limits)
    assert result is not None and result.reason is reason and words in result.detail


def test_a_bomb_in_the_graph_that_predicts_is_found_too(linear: Path, tmp_path: Path) -> None:
    folder = make_bomb("loop", linear, tmp_path / "bomb", "infer")
    result = try_artifact(folder, TrialLimits(1.0))
    assert result is not None and result.reason is Reason.STEP_TOO_LONG
    assert "its infer graph" in result.detail


def test_what_is_no_artifact_is_named_and_a_device_that_stops_does_not_wait(
    linear: Path, tmp_path: Path
) -> None:
    result = try_artifact(tmp_path, TrialLimits(60.0))
    assert result is not None and result.reason is Reason.DOES_NOT_FIT
    assert "does not exist" in result.detail
    assert try_artifact(linear, TrialLimits(60.0), lambda: True) is None


def test_an_apps_own_program_is_not_started_for_it(
    linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert can_try()
    monkeypatch.setattr(sys, "executable", "/opt/shop/shop")
    assert not can_try() and try_artifact(linear, TrialLimits(60.0)) is None


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_an_app_that_waits_for_no_child_is_told_the_same(linear: Path, tmp_path: Path) -> None:
    # As daemons do: how a child ended is then known to nobody.
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert try_artifact(linear, TrialLimits(60.0, GIB)) == PASSED
        crash = try_artifact(make_bomb("crash", linear, tmp_path / "crash"), TrialLimits(60.0, GIB))
        memory = make_bomb("memory", linear, tmp_path / "memory")
        large = try_artifact(memory, TrialLimits(60.0, GIB))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert crash is not None and crash.reason is Reason.CRASHED
    assert crash.detail.endswith("ended the process")
    assert large is not None and large.reason is Reason.OUT_OF_MEMORY
