"""Bytes that are no requests, and clients that are slow on purpose: others are served meanwhile."""

from __future__ import annotations

import re
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.brokers.authority import Authority
from tests.fakes.consoles import ConsoleProcess, add_users, running_console
from tests.fakes.homes import make_home, serving
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleProcess]:
    home = make_home(tmp_path_factory.mktemp("console"), "mqtt://127.0.0.1:1", "quorum = 1")
    with serving(home):
        pass
    add_users(home)
    with running_console(home) as found:
        yield found


def _connected(console: ConsoleProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", console.port), PATIENCE_SECONDS)


def _is_served(console: ConsoleProcess) -> bool:
    url = f"http://127.0.0.1:{console.port}/login"
    return httpx.get(url, timeout=PATIENCE_SECONDS).status_code == 200


def _heard(connection: socket.socket) -> bytes:
    """All that comes until the other end hangs up, which it has to."""
    found = b""
    try:
        while more := connection.recv(65536):
            found += more
    except ConnectionError:
        pass
    return found


HEAD = b"GET /login HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BODY = (
    b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\nname="
)
"""A part of a form."""
NONSENSE = {
    "nothing": b"",
    "zeros": b"\0" * 4096,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 600,
    "no version": b"GET /login\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /login HTTP/1.1\r\n\r\n",
    "two hosts": HEAD + b"Host: evil.example\r\n\r\n",
    "a long line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    "a long header": HEAD + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    "many headers": HEAD + b"X: y\r\n" * 20_000 + b"\r\n",
    "two lengths": b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n"
    b"Content-Length: 2\r\n\r\nab",
    "a length below zero": b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
    "length and chunks": b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /do HTTP/1.1\r\n\r\n",
    "chunks of nonsense": b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "an upgrade": HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "a whole address": b"GET http://evil.example/login HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a tunnel": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a folded header": HEAD + b"X: a\r\n b\r\n\r\n",
    "a header of nonsense": HEAD + b"\xff\xfe: \x80\r\n\r\n",
    "a method of nonsense": b"\xc3\x28 / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_refused_and_harms_nobody(console: ConsoleProcess, kind: str) -> None:
    with _connected(console) as connection:
        try:
            connection.sendall(NONSENSE[kind])
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has hung up already
        answer = _heard(connection)
    assert b"Traceback" not in answer
    if answer:
        assert int(answer.split()[1]) in (200, 400, 403, 404, 405), answer[:200]
    assert console.process.poll() is None and _is_served(console)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=2000),
        st.lists(
            st.sampled_from([b"GET ", b"POST ", b"/login", b"/do/add", b" HTTP/1.1", b"\r\n", b":"])
            | st.binary(max_size=20),
            max_size=40,
        ).map(b"".join),
        st.binary(max_size=500).map(lambda each: HEAD + each + b"\r\n\r\n"),
    )
)
def test_any_bytes_harm_nobody(console: ConsoleProcess, sent: bytes) -> None:
    with _connected(console) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        assert b"Traceback" not in _heard(connection)
    assert console.process.poll() is None


def test_nonsense_fills_no_log(console: ConsoleProcess) -> None:
    for _ in range(200):
        with _connected(console) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            _heard(connection)
    assert _is_served(console)
    assert console.log.read_text().count("Invalid HTTP request") <= 10


def test_clients_that_never_say_what_they_want_keep_nobody_out(console: ConsoleProcess) -> None:
    """Slowloris: whoever has most makes room, and each is ended in time."""
    with ExitStack() as stack:
        slow = [stack.enter_context(_connected(console)) for _ in range(500)]
        for each in slow:
            with suppress(OSError):
                each.sendall(HEAD)
        with socket.socket() as other:  # somebody else, from another address of this machine
            other.bind(("127.0.0.2", 0))
            other.settimeout(PATIENCE_SECONDS)
            other.connect(("127.0.0.1", console.port))
            other.sendall(HEAD + b"Connection: close\r\n\r\n")
            assert _heard(other).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        assert _is_served(console), "from the same address, too"
        for each in slow:
            assert _heard(each) == b""
        assert time.monotonic() - began < PATIENCE_SECONDS
    wait_until(lambda: _is_served(console))


@pytest.mark.parametrize("kind", ["headers", "bodies", "idle"])
def test_many_addresses_that_hold_connections_keep_nobody_out(
    console: ConsoleProcess, kind: str
) -> None:
    asks = {"headers": HEAD, "bodies": BODY, "idle": HEAD + b"\r\n"}
    with ExitStack() as stack:
        for number in range(500):
            other = stack.enter_context(socket.socket())
            other.bind((f"127.0.0.{2 + number % 5}", 0))
            other.settimeout(PATIENCE_SECONDS)
            other.connect(("127.0.0.1", console.port))
            with suppress(OSError):
                other.sendall(asks[kind])
        for _ in range(3):
            assert _is_served(console)


def test_who_goes_away_while_he_sends_fills_no_log(console: ConsoleProcess) -> None:
    before = len(console.log.read_text())
    for _ in range(3):
        with _connected(console) as connection:
            connection.sendall(BODY)
            time.sleep(0.1)
    assert _is_served(console)
    assert "Traceback" not in console.log.read_text()[before:]


@pytest.mark.exhaustive
def test_a_header_that_comes_byte_by_byte_is_given_up(console: ConsoleProcess) -> None:
    with _connected(console) as connection:

        def is_ended() -> bool:
            try:
                connection.sendall(b"X")
            except OSError:
                return True
            return False

        connection.sendall(HEAD)
        wait_until(is_ended, every_seconds=0.5)


@pytest.mark.exhaustive
def test_a_body_that_does_not_come_is_given_up_in_words(console: ConsoleProcess) -> None:
    with _connected(console) as connection:
        connection.sendall(BODY)
        answer = _heard(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"came too slowly" in answer


def test_who_does_not_take_his_answers_is_let_go(console: ConsoleProcess) -> None:
    """What waits to be sent is bounded, and so is the time that it waits."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(1.0)
        connection.connect(("127.0.0.1", console.port))
        ask = b"GET /static/look.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"

        def is_ended() -> bool:
            try:
                connection.sendall(ask * 200)
            except TimeoutError:
                return False
            except OSError:
                return True
            return False

        wait_until(is_ended)
    assert _is_served(console)


def test_tls_that_is_not_begun_is_given_up_and_a_renewed_certificate_is_used(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("console")
    lines = f'[console]\ncertificate = "{certificate}"\nkey = "{key}"\n'
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1", lines)
    with serving(home), running_console(home) as console:
        address = ("127.0.0.1", console.port)
        with _connected(console) as silent:
            before = ssl.get_server_certificate(address, timeout=PATIENCE_SECONDS)
            assert _heard(silent) == b""
        key.write_text("half of a")
        wait_until(lambda: "the certificate of before is used on" in console.log.read_text())
        assert ssl.get_server_certificate(address, timeout=PATIENCE_SECONDS) == before
        authority.issue("console")
        wait_until(
            lambda: ssl.get_server_certificate(address, timeout=PATIENCE_SECONDS) != before,
            every_seconds=1,
        )


def _peak_bytes(console: ConsoleProcess) -> int:
    """Of memory; 0 where the system does not say."""
    status = Path(f"/proc/{console.process.pid}/status")
    said = re.search(r"VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else "")
    return 0 if said is None else int(said[1]) << 10


def test_tls_that_is_begun_by_many_keeps_nobody_out(tmp_path: Path) -> None:
    """The console has fewer files than connections are begun, and gives none much memory."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("console")
    lines = f'[console]\ncertificate = "{certificate}"\nkey = "{key}"\n'
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1", lines)
    with serving(home), running_console(home) as console, ExitStack() as stack:
        if hasattr(resource, "prlimit"):
            resource.prlimit(console.process.pid, resource.RLIMIT_NOFILE, (480, 480))
        address = ("127.0.0.1", console.port)
        assert ssl.get_server_certificate(address, timeout=PATIENCE_SECONDS)
        before = _peak_bytes(console)
        for number in range(700):
            other = stack.enter_context(socket.socket())
            other.bind((f"127.0.0.{2 + number % 2}", 0))
            other.settimeout(PATIENCE_SECONDS)
            other.connect(address)
        assert ssl.get_server_certificate(address, timeout=PATIENCE_SECONDS)
        assert _peak_bytes(console) - before < 100 << 20
    assert "Too many open files" not in console.log.read_text()


def test_a_console_on_a_terminal_ends_when_it_is_told(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1")
    with serving(home):
        pass
    with running_console(home) as found:
        wait_until(lambda: "nobody can log in yet" in found.log.read_text())
        with httpx.stream("GET", f"http://127.0.0.1:{found.port}/login") as answer:
            answer.read()
    assert found.process.returncode == 0
