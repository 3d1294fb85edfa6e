"""serve runs the console beside itself, ends it, and goes on whatever becomes of it."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from aggregator.errors import TaskError
from aggregator.home import AggregatorHome
from aggregator.operate.fleet import Fleet
from aggregator.serve.beside import Beside
from aggregator.task.file import read_console, read_task
from tests.brokers.authority import Authority
from tests.brokers.mosquitto import Mosquitto, free_port
from tests.fakes.consoles import add_users
from tests.fakes.homes import ServeProcess, make_home
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow


def _home(folder: Path, url: str, lines: str) -> AggregatorHome:
    made = make_home(folder, url, "quorum = 1", f"[console]\n{lines}\n")
    add_users(made)
    return made


def _problems(home: AggregatorHome) -> dict[str, str]:
    with Fleet.open(home.folder) as fleet:
        return {each.code: each.what for each in fleet.health().problems}


def _consoles(home: AggregatorHome) -> list[int]:
    """Process numbers of those that run for a home."""
    return [
        each.pid
        for each in psutil.process_iter()
        if {"console", str(home.folder)} <= set(_command_of(each))
    ]


def _command_of(process: psutil.Process) -> list[str]:
    try:  # of one that has ended it is empty
        return process.cmdline()
    except psutil.Error:
        return []


def test_it_answers_over_tls_and_ends_with_serve_however_that_ends(
    tmp_path: Path, mosquitto: Mosquitto
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("console")
    port = free_port()
    home = _home(
        tmp_path,
        mosquitto.url,
        f'address = "127.0.0.1:{port}"\ncertificate = "{certificate}"\nkey = "{key}"',
    )
    serve = ServeProcess(home)
    serve.start()
    try:
        wait_until(lambda: "the console is at https" in serve.log.read_text(), serve.log.read_text)
        context = ssl.create_default_context(cafile=str(authority.ca_file))
        answer = httpx.get(
            f"https://127.0.0.1:{port}/login", verify=context, timeout=PATIENCE_SECONDS
        )
        assert answer.status_code == 200 and "Log in" in answer.text
        assert "console-away" not in _problems(home)
        # A console that dies is there again by itself.
        (first,) = _consoles(home)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: _consoles(home) not in ([], [first]), serve.log.read_text)
        wait_until(
            lambda: serve.log.read_text().count("the console is at") == 2, serve.log.read_text
        )
        wait_until(lambda: "console-away" not in _problems(home))
        serve.kill()
        wait_until(lambda: not _consoles(home), "the console outlives a serve that was killed")
        serve.start()
        wait_until(
            lambda: serve.log.read_text().count("the console is at") == 3, serve.log.read_text
        )
    finally:
        assert serve.stop() == 0
    assert _consoles(home) == []


@pytest.mark.parametrize("harm", ["port", "certificate", "no certificate", "users"])
def test_serve_goes_on_where_the_console_cannot_begin_and_says_why(
    tmp_path: Path, mosquitto: Mosquitto, harm: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if harm == "port" else free_port()
        lines = f'address = "127.0.0.1:{port}"'
        if "certificate" in harm:
            lines += '\ncertificate = "none.pem"\nkey = "none.key"'
        home = _home(tmp_path, mosquitto.url, lines)
        if harm == "certificate":
            for name in ("none.pem", "none.key"):
                (home.folder / name).write_text("no certificate")
        if harm == "users":
            home.console_file.write_text("{")
        said = {
            "port": "cannot listen at 127.0.0.1",
            "certificate": "are no certificate with its key",
            "no certificate": "console.certificate",
            "users": "console.json cannot be read",
        }[harm]
        serve = ServeProcess(home)
        serve.start()
        try:
            serve.await_connections(1)
            wait_until(lambda: "console-away" in _problems(home), serve.log.read_text)
            assert said in _problems(home)["console-away"]
            assert "round" not in _problems(home)["console-away"]
            assert serve.ended() is None
        finally:
            assert serve.stop() == 0


def test_without_its_table_nothing_of_it_is_there(tmp_path: Path) -> None:
    """Neither imported by serve's modules, nor begun; and serve needs none of its libraries."""
    code = (
        "import sys; import aggregator.cli.serve, aggregator.cluster.serve; "
        "print([n for n in sys.modules if n.startswith(('aggregator.console', 'starlette', "
        "'uvicorn', 'jinja2', 'argon2'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout == "[]\n", done.stderr
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    assert read_task(home.task_file).fleet.console.address is None


@pytest.mark.parametrize("library", ["starlette", "argon2", "jinja2", "uvicorn", "segno"])
def test_without_its_extra_it_says_what_to_install(tmp_path: Path, library: str) -> None:
    code = (
        f"import sys; sys.modules[{library!r}] = None; from aggregator.cli import main; "
        "sys.exit(main())"
    )
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    done = subprocess.run(
        [sys.executable, "-c", code, "console", "--home", str(home.folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"tessera-aggregator: {library} is not installed, which only the console needs: "
        "pip install 'tessera-edge[console]'\n"
    )


def test_it_is_tried_again_after_longer_and_longer() -> None:
    waits: list[float] = []

    def wait(ending: threading.Event, seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 8:
            ending.set()
        return ending.is_set()

    beside = Beside([sys.executable, "-c", "print('tessera-aggregator: no')"], wait)
    with beside:
        wait_until(lambda: len(waits) == 8)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert beside.problem() == "no"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('address = "0.0.0.0:8443"', "passwords would be sent in the clear"),
        ('address = "10.1.2.3:8443"', "name certificate and key"),
        ('address = "8443"', "an address of this machine with a port"),
        ('address = "127.0.0.1:99999"', "an address of this machine with a port"),
        ('address = "127.0.0.1:1"\ncertificate = "a.pem"', "belong together"),
        ('address = "127.0.0.1:1"\nproxy_user_header = "X-User"', "trusted_proxy"),
        ('trusted_proxy = "everybody"', "has to be an address"),
        ('trusted_proxy = "::1"\nproxy_user_header = "X User"', "a header's name"),
        ("addres = 1", "addres"),
        ("address = 1", "address"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(
    tmp_path: Path, lines: str, said: str
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", "", f"[console]\n{lines}\n")
    for read in (read_task, read_console):
        with pytest.raises(TaskError, match="console") as caught:
            read(home.task_file)
        assert said in str(caught.value)


@pytest.mark.parametrize(
    "lines",
    [
        'address = "[::1]:8443"',
        'address = "localhost:0"',
        'address = "0.0.0.0:1"\ncertificate = "a"\nkey = "b"',
        'address = "0.0.0.0:1"\ntrusted_proxy = "10.0.0.0/8"\nproxy_user_header = "X-User"',
    ],
)
def test_settings_that_are_taken(tmp_path: Path, lines: str) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", "", f"[console]\n{lines}\n")
    assert read_console(home.task_file) == read_task(home.task_file).fleet.console
