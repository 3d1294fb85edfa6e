"""Whoever reaches the metrics port holds little of serve, for a short time, and logs nothing."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregator.serve.metrics import Snapshot, Told, serve_metrics
from aggregator.task.file import MetricsSettings
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

TOLD = Told(lambda: None)


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)


def _healthy(port: int) -> bool:
    url = f"http://127.0.0.1:{port}/healthz"
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        return bool(answer.read() == b"works\n")


def _is_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def _quiet(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert (caplog.messages, *capfd.readouterr()) == ([], "", "")


def test_many_who_ask_nothing_hold_few_threads_and_keep_nobody_out() -> None:
    before = threading.active_count()
    with serve_metrics(MetricsSettings(), TOLD) as port, ExitStack() as stack:
        idle = [stack.enter_context(_connected(port)) for _ in range(200)]
        assert _healthy(port)
        assert threading.active_count() - before <= 40
        wait_until(lambda: sum(map(_is_ended, idle)) >= 160)
        assert _healthy(port)


def test_a_question_that_comes_byte_by_byte_is_given_up() -> None:
    now_seconds = [100.0]
    with (
        serve_metrics(MetricsSettings(), TOLD, clock=lambda: now_seconds[0]) as port,
        _connected(port) as slow,
        _connected(port) as other,
    ):
        slow.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        assert _healthy(port)
        now_seconds[0] += 9.0
        other.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert other.recv(12) == b"HTTP/1.0 200"
        now_seconds[0] += 2.0

        def is_given_up() -> bool:
            with suppress(OSError):
                slow.sendall(b"x")
            return _is_ended(slow)

        wait_until(is_given_up)


def test_whoever_hangs_up_logs_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    began = threading.active_count()
    with _quiet(capfd, caplog), serve_metrics(MetricsSettings(), TOLD) as port:
        for sent in (b"", b"GET /healthz", b"GET / HTTP/1.1\r\nX: y", b"nonsense\r\n\r\n"):
            with _connected(port) as connection:
                connection.sendall(sent)
                # Hang up by a reset.
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert _healthy(port)
        wait_until(lambda: threading.active_count() <= began + 1)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serve_metrics(MetricsSettings(), TOLD) as found:
        yield found


_WORDS = [b"GET ", b"/metrics?name[]=a", b" HTTP/1.1", b"\r\n", b":", b"Accept: ", b"text/plain;"]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sent=st.lists(st.sampled_from(_WORDS) | st.binary(max_size=20), max_size=20).map(b"".join)
    | st.binary(max_size=300).map(lambda each: b"GET /metrics HTTP/1.1\r\nAccept: " + each)
    | st.binary(max_size=300).map(lambda each: b"GET /metrics HTTP/1.1\r\n" + each)
)
def test_any_bytes_log_nothing(
    port: int, sent: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with _quiet(capfd, caplog), _connected(port) as connection, suppress(ConnectionError):
        connection.sendall(sent + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


def test_a_mistake_of_our_own_is_one_event(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Snapshot | None:
        raise KeyError("x")

    with (
        serve_metrics(MetricsSettings(), Told(fails)) as port,
        pytest.raises(urllib.error.HTTPError, match="500"),
    ):
        url = f"http://127.0.0.1:{port}/metrics"
        urllib.request.urlopen(url, timeout=PATIENCE_SECONDS)
    (line,) = caplog.records
    assert vars(line)["event"] == "metrics-fail" and line.levelno == logging.ERROR
    assert line.exc_info is not None
    assert capfd.readouterr().err == ""
