"""Children of the demo end with it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from aggregator.demo.child import ROOT, Child
from tests.fakes.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes")

_LEASH = [sys.executable, "-m", "aggregator.demo.child"]
# Says that it runs; with "stubborn" it does not care about SIGTERM.
_COMMAND = """
import signal, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def gone(processes: list[psutil.Process]) -> bool:
    return psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)[1] == []


def started(child: Child) -> list[psutil.Process]:
    until = time.monotonic() + PATIENCE_SECONDS
    while "up" not in child.log.read_text(encoding="utf-8"):
        assert time.monotonic() < until
        assert child.running
        time.sleep(0.02)
    leash = psutil.Process(child.process.pid)
    return [leash, *leash.children(recursive=True)]


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_a_leashed_command_ends_when_the_pipe_closes(tmp_path: Path, manner: str) -> None:
    child = Child.start("c", [sys.executable, "-c", _COMMAND, manner], tmp_path, leash=True)
    processes = started(child)
    assert len(processes) == 2
    assert child.process.stdin is not None
    # What the system does with the files of a process that is killed.
    child.process.stdin.close()
    assert gone(processes)


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_stop_ends_the_command_with_its_leash(tmp_path: Path, manner: str) -> None:
    child = Child.start("c", [sys.executable, "-c", _COMMAND, manner], tmp_path, leash=True)
    processes = started(child)
    child.stop(timeout_seconds=0.5)
    assert gone(processes)


def test_the_commands_status_is_the_leashs() -> None:
    for code, expected in (
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ):
        command = [*_LEASH, sys.executable, "-c", code]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
            assert process.wait(PATIENCE_SECONDS) == expected
    nothing = subprocess.run(_LEASH, cwd=ROOT, capture_output=True, check=False)
    assert nothing.returncode == 2
