"""Where `tessera-device join` takes the code from, and who else can see it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.brokers.mosquitto import Mosquitto
from tests.fakes.small_aggregator import SmallAggregator
from tests.fakes.waiting import PATIENCE_SECONDS

JOIN = (sys.executable, "-m", "device_sdk.cli", "join")
SILENT = "mqtt://127.0.0.1:1"
on_linux = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")


@pytest.fixture
def aggregator(mosquitto: Mosquitto) -> Iterator[SmallAggregator]:
    with SmallAggregator(mosquitto.url) as running:
        yield running


@contextmanager
def joining(url: str, *arguments: str, stdin: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [*JOIN, url, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # no terminal but the one that is given
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def shown(process: subprocess.Popen[bytes]) -> bytes:
    """What other users' and the same user's `ps` show: arguments and environment."""
    folder = Path(f"/proc/{process.pid}")
    return (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()


def letters(shown_bytes: bytes) -> bytes:
    return shown_bytes.replace(b"-", b"").upper()


@on_linux
def test_a_code_from_standard_input_is_not_among_what_ps_shows(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    code = aggregator.code()
    home = str(tmp_path / "home")
    with joining(mosquitto.url, "--home", home, stdin=subprocess.PIPE) as process:
        process.stdin.write(code.encode() + b"\n")
        process.stdin.flush()
        seen = []
        with suppress(ProcessLookupError):  # it ended between the two lines
            while process.poll() is None:
                seen.append(shown(process))
                time.sleep(0.01)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
    assert b"joined as device" in output
    assert any(b"join" in one for one in seen)
    assert not any(letters(code.encode()) in letters(one) for one in seen)
    assert code.encode() not in output + errors


def test_a_code_from_a_file_joins(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    (tmp_path / "code").write_text(f"{aggregator.code()}\n\n")
    given = ("--code-file", str(tmp_path / "code"), "--home", str(tmp_path / "home"))
    done = subprocess.run(
        [*JOIN, mosquitto.url, *given], capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""


@on_linux
def test_a_code_typed_at_the_prompt_is_not_echoed(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    code = aggregator.code()
    ours, theirs = pty.openpty()
    try:
        with joining(mosquitto.url, "--home", str(tmp_path / "home"), stdin=theirs) as process:
            assert process.stderr is not None
            prompt = b""
            while b"(not shown):" not in prompt:
                more = os.read(process.stderr.fileno(), 1024)
                assert more, prompt
                prompt += more
            os.write(ours, code.encode() + b"\n")
            output, errors = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0, errors
            assert b"joined as device" in output
            os.set_blocking(ours, False)
            try:
                echoed = os.read(ours, 4096)
            except BlockingIOError:
                echoed = b""
            assert letters(code.encode())[:12] not in letters(echoed + prompt + output + errors)
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_code_among_the_arguments_joins_and_is_said_to_be_visible(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    code = aggregator.code()
    given = (code, "--home", str(tmp_path / "home"))
    done = subprocess.run(
        [*JOIN, mosquitto.url, *given], capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0
    assert b"every user of this machine can read it" in done.stderr
    assert code.encode() not in done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "given", "told"),
    [
        ((), "", "standard input holds no enrolment code"),
        (("-",), "\nCODE\n", "standard input holds no enrolment code"),
        (("--code-file", "nowhere"), "", "nowhere cannot be read: No such file or directory"),
        (("CODE", "--code-file", "nowhere"), "", "the code is given twice"),
        (("--code-file", "nowhere", "CODE"), "", "the code is given twice"),
        (("--timeout", "1", "CODE"), "", "the enrolment code is mistyped"),
        ((), "mistyped\n", "the enrolment code is mistyped"),
        ((), "A" * 100_000, "the enrolment code is mistyped"),
    ],
)
def test_a_code_that_is_missing_or_no_code_says_so(
    arguments: tuple[str, ...], given: str, told: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [*JOIN, SILENT, *arguments, "--home", str(tmp_path / "home")],
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr
