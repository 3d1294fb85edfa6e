"""Artifacts that do harm, each in a process of its own: it ends, and the words say what it did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from device_sdk.factorisation import packaged_artifact
from device_sdk.trial import PASSED, TrialLimits, can_try, try_artifact
from device_sdk.wire.publish.report import Reason
from tests.fakes.bombs import Bomb, make_bomb
from tests.fakes.handmade import linear_artifact
from tests.fakes.quick import run_python

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


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [
        ("late-loop", Reason.STEP_TOO_LONG, "step 51 did not end"),
        ("late-memory", Reason.OUT_OF_MEMORY, "step 51 takes more memory"),
        ("late-crash", Reason.CRASHED, "step 51 ended the process"),
    ],
)
def test_what_comes_with_the_fifty_first_step_is_found_where_further_steps_are_taken(
    linear: Path, tmp_path: Path, kind: Bomb, reason: Reason, words: str
) -> None:
    folder = make_bomb(kind, linear, tmp_path / "bomb", after=50)
    assert try_artifact(folder, TrialLimits(1.0, GIB)) == PASSED
    result = try_artifact(folder, TrialLimits(1.0, GIB, more_seconds=60.0))
    assert result is not None and result.reason is reason and words in result.detail


def _kill_when_it_runs(number: int) -> Callable[[], bool]:
    """To be asked now and then; sends the trial's process a signal once that is in its loop."""
    looks: list[int] = []

    def look() -> bool:
        # Another test of this process may have left children of its own.
        own = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        score = {each: Path(f"/proc/{each}/oom_score_adj").read_text().strip() for each in own}
        for each in (each for each in own if score[each] == "1000"):
            looks.append(1)
            if len(looks) == 50:
                os.kill(int(each), number)
        return False

    return look


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("ends", "waits"),
    [
        (signal.SIGKILL, True),
        (signal.SIGTERM, True),
        (signal.SIGHUP, True),
        (signal.SIGKILL, False),
    ],
)
def test_whoever_kills_it_says_nothing_of_the_artifact(
    linear: Path, tmp_path: Path, ends: signal.Signals, waits: bool
) -> None:
    folder = make_bomb("loop", linear, tmp_path / "bomb")
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL if waits else signal.SIG_IGN)
    # What nohup started ignores a hang-up, and so does what that starts.
    hung_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        result = try_artifact(folder, TrialLimits(1e6), _kill_when_it_runs(ends))
    finally:
        signal.signal(signal.SIGHUP, hung_up)
        signal.signal(signal.SIGCHLD, before)
    assert result is not None and result.reason is Reason.KILLED and not result.certain
    assert "ended from outside" in result.detail
    assert not waits or f"by {ends.name}" in result.detail


_IN_A_GROUP = """
import os, sys
from pathlib import Path
from device_sdk.trial import TrialLimits, try_artifact

(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
result = try_artifact(Path(sys.argv[2]), TrialLimits(1e6, 2**36))
print(result.reason.value, result.certain, result.detail)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_kill_for_want_of_memory_is_told_from_others(linear: Path, tmp_path: Path) -> None:
    folder = make_bomb("memory", linear, tmp_path / "bomb")
    group = Path(f"/sys/fs/cgroup/memory/tessera-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("takes the right to make a control group, of version 1")
    try:
        (group / "memory.limit_in_bytes").write_text(str(300 * 2**20))
        command = [sys.executable, "-c", _IN_A_GROUP, str(group), str(folder)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        group.rmdir()
    assert told.startswith("out-of-memory False its first run was ended for want of memory")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_terminals_interrupt_is_left_to_the_app(linear: Path, tmp_path: Path) -> None:
    folder = make_bomb("loop", linear, tmp_path / "bomb")
    result = try_artifact(folder, TrialLimits(3.0), _kill_when_it_runs(signal.SIGINT))
    assert result is not None and result.reason is Reason.STEP_TOO_LONG


def test_an_environment_in_which_nothing_starts_is_no_fault_of_the_artifact(
    linear: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise OSError('no space left')")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), *sys.path])
        assert try_artifact(linear, TrialLimits(60.0)) is None
    assert "no first run in a process of its own: OSError: no space left" in caplog.text
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert try_artifact(linear, TrialLimits(60.0)) is None
    assert "no process could be started" in caplog.text


_NO_THREADS = """
import logging, sys, threading
from pathlib import Path
from device_sdk.trial import TrialLimits, try_artifact
logging.basicConfig()
threading.stack_size(2**45)
print(try_artifact(Path(sys.argv[1]), TrialLimits(60.0)))
"""


def test_where_no_thread_is_to_be_had_nothing_is_held_against_the_artifact(linear: Path) -> None:
    """In a process of its own: as the test of that name in ``runtime/test_watch.py``."""
    done = run_python("-c", _NO_THREADS, linear)
    assert done.stdout == "None\n", done.stderr
    assert "can't start new thread" in done.stderr


@pytest.mark.parametrize(
    ("name", "is_python"),
    [
        ("python", True),
        ("python3.11", True),
        ("python3.13t", True),
        ("pythonw.exe", True),
        ("Python", True),
        ("pypy3.10", True),
        ("python_shop", False),
        ("python-shop", False),
        ("pythonista3", False),
        ("", False),
    ],
)
def test_which_programs_are_python(
    linear: Path, name: str, is_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", name and f"/opt/{name}")
    assert can_try() == is_python
    assert is_python or try_artifact(linear, TrialLimits(60.0)) is None, "an app's own program"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_trials_take_turns(linear: Path) -> None:
    """Each may take all the memory that there is: of two at once one would be killed for it."""
    at_once: list[int] = []

    def look() -> bool:
        # Another test of this process may have left children of its own.
        own = Path("/proc/self/task").glob("*/children")
        names = [name for each in own for name in each.read_text().split()]
        said = [Path(f"/proc/{name}/cmdline") for name in names]
        at_once.append(sum(b"device_sdk.trial" in each.read_bytes() for each in said))
        return False

    arguments = (linear, TrialLimits(60.0), look)
    threads = [threading.Thread(target=try_artifact, args=arguments) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert max(at_once) == 1


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
