"""A process that is asked to end while Ray starts, or does not answer, ends as it should."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.waiting import PATIENCE_SECONDS

pytest.importorskip("ray")

_PROGRAM = """
import signal, sys, threading
from device_sdk.system.command_line import held_signals
with held_signals():
    import numpy
    from aggregator.cluster.joined_ray import JoinedRay
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
joined = JoinedRay(sys.argv[1] or None, 1, log_to_driver=False)
print("begins", flush=True)
has_joined = joined.join()
joined.leave()
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Python ends without a handler of ours
print(has_joined, bool(asked), flush=True)
"""


def _asked_to_end(address: str, folder: Path, when: Callable[[], object]) -> str:
    """What the process says that is sent SIGTERM all the time from ``when`` on."""
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, address],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
            when()
            until_seconds = time.monotonic() + PATIENCE_SECONDS
            while not select.select([process.stdout], [], [], 0.02)[0]:
                assert time.monotonic() < until_seconds
                process.send_signal(signal.SIGTERM)
            said = process.stdout.read()
            assert process.wait(PATIENCE_SECONDS) == 0, said
            return said
        finally:
            process.kill()


def test_while_a_ray_of_its_own_starts() -> None:
    """Ray takes SIGTERM for itself at some moment of it, and would end the process with a dump."""
    folder = Path(tempfile.mkdtemp(prefix="u"))  # short, as sockets' paths have to be
    assert _asked_to_end("", folder, lambda: None) == "False True\n"
    assert list(folder.iterdir()) == []
    folder.rmdir()


def test_while_a_head_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as silent:  # Ray asks this machine by its other address
        silent.settimeout(PATIENCE_SECONDS)

        def knocked() -> None:
            # Whether it is there; and who shows no token, and waits for an answer.
            for _ in range(2):
                silent.accept()

        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said = _asked_to_end(address, tmp_path, knocked)
    assert said == "False True\n"
