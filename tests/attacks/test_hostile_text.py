"""A broker that puts lines and escape sequences into what it says: in our logs and on terminals."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.homes import make_home
from tests.fakes.waiting import PATIENCE_SECONDS
from tests.faults.fleet_home import make_fleet

_FORGED = "2026-11-22 09:00:00,000 INFO    round 7 closed: version 8"
_REASON = f"x\n{_FORGED}\r\x1b]0;owned\x07\x1b[2K\u202e\u2066".encode()


@pytest.fixture
def refusing_broker() -> Iterator[str]:
    """A broker that refuses each connection (bad user name or password), and says why."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        properties = b"\x1f" + len(_REASON).to_bytes(2, "big") + _REASON
        body = b"\x00\x86" + bytes([len(properties)]) + properties
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(b"\x20" + bytes([len(body)]) + body)
                time.sleep(0.2)

    threading.Thread(target=serve, daemon=True).start()
    yield f"mqtt://127.0.0.1:{server.getsockname()[1]}"
    server.close()


def _output_of(command: list[str], until: bytes, *, terminal: bool = False) -> bytes:
    """What a command wrote, ended once ``until`` was seen in it."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "400", "LINES": "50"}
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    written = b""
    ends = time.monotonic() + PATIENCE_SECONDS
    while until not in written and time.monotonic() < ends:
        if select.select([ours], [], [], 0.5)[0]:
            try:
                written += os.read(ours, 65_536)
            except OSError:
                break
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE_SECONDS)
    finally:
        process.kill()
    os.close(ours)
    assert until in written, written
    return written


def _shown_in_one_line(written: bytes) -> None:
    text = written.decode()
    (line, *_) = [line for line in text.splitlines() if "owned" in line]
    assert "x\\n2026-11-22" in line and "\\x1b]0;owned\\x07\\x1b[2K\\u202e\\u2066" in line
    assert not any(each.startswith(_FORGED[:30]) for each in text.splitlines())
    assert "\u202e" not in text and "\x1b]0;owned" not in text and "\x07" not in text


def test_serve_shows_a_broker_s_reason_in_one_line(tmp_path: Path, refusing_broker: str) -> None:
    home = make_home(tmp_path, refusing_broker)
    command = ["aggregator.cli", "serve", "--home", str(home.folder), "--plain"]
    _shown_in_one_line(_output_of(command, b"2066"))


def test_the_live_view_obeys_no_broker(tmp_path: Path, refusing_broker: str) -> None:
    home = make_home(tmp_path, refusing_broker)
    command = ["aggregator.cli", "serve", "--home", str(home.folder)]
    written = _output_of(command, b"2066", terminal=True).decode()
    assert "\x1b]0;owned" not in written and "\x07" not in written and "\u202e" not in written
    # Rich colours words and breaks lines by sequences of its own.
    assert "owned" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


@pytest.mark.parametrize("place", ["run", "join"])
def test_a_device_s_commands_show_it_in_one_line(
    tmp_path: Path, refusing_broker: str, place: str
) -> None:
    if place == "run":
        fleet = make_fleet(tmp_path, refusing_broker, 1, "quorum = 1", 5)
        more = ["run", "--home", str(fleet.devices[0])]
    else:
        home = make_home(tmp_path, refusing_broker)
        from tests.fakes.homes import invite

        (code,) = invite(home)
        folder = str(tmp_path / "device")
        more = ["join", refusing_broker, code, "--home", folder, "--timeout", str(PATIENCE_SECONDS)]
    _shown_in_one_line(_output_of(["device_sdk.cli", *more], b"2066"))
