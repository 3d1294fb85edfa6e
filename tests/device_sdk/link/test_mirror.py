"""Files by their hash from a real web server, and from servers that fail in every way."""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.link.mirror import Mirror, parse_mirror_url
from tests.brokers.authority import Authority
from tests.brokers.connect_proxy import ConnectProxy
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

FILES = {hashlib.sha256(body).digest(): body for body in (b"a" * 70_000, b"b", b"")}
Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


def whole(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def web_server(
    answer: Answer = whole, tls: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[str]]]:
    """A server of FILES under /fleet/, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            body = FILES.get(bytes.fromhex(self.path.rsplit("/", 1)[-1]))
            if body is None or not self.path.startswith("/fleet/"):
                self.send_error(404)
            else:
                answer(self, body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{server.server_port}/fleet/", asked
    finally:
        server.shutdown()
        server.server_close()


def collected(mirror: Mirror, count: int) -> dict[bytes, bytes | None]:
    found: dict[bytes, bytes | None] = {}

    def all_came() -> bool:
        found.update(mirror.take())
        return len(found) == count

    wait_until(all_came)
    return found


@contextmanager
def mirror_of(url: str, **settings: object) -> Iterator[Mirror]:
    given: dict[str, Any] = {"most_bytes": 1 << 17, "clock": time.monotonic, "proxy": ""}
    mirror = Mirror(url, **given | settings)
    try:
        yield mirror
    finally:
        mirror.stop()


def test_files_come_by_their_hash_and_connections_are_kept() -> None:
    with web_server() as (url, asked), mirror_of(url) as mirror:
        mirror.fetch(FILES)
        assert collected(mirror, len(FILES)) == FILES
        # On a busy machine a connection may be given up, and one of them asked for again.
        assert set(asked) == {f"/fleet/{digest.hex()}" for digest in FILES}
        assert mirror.problem == ""


def test_files_come_over_tls_through_a_proxy(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, client = (
        ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    server.load_cert_chain(*authority.issue("server"))
    client.load_verify_locations(authority.ca_file)
    with web_server(tls=server) as (url, _), ConnectProxy("edge:secret") as proxy:
        way = proxy.url.replace("//", "//edge:secret@")
        with mirror_of(url, tls=client, proxy=way) as mirror:
            mirror.fetch(FILES)
            assert collected(mirror, len(FILES)) == FILES
            assert set(proxy.targets) == {url.removeprefix("https://").removesuffix("/fleet/")}


def test_somebody_is_told_of_each_result() -> None:
    told = threading.Event()
    with web_server() as (url, _), mirror_of(url, on_result=told.set) as mirror:
        mirror.fetch(list(FILES)[:1])
        assert told.wait(60)


def wrong_bytes(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    whole(handler, body + b"!")


def too_many(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x" * 65_536)


def cut_short(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body) + 10))
    handler.end_headers()
    handler.wfile.write(body)
    handler.close_connection = True


def elsewhere(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_response(302)
    handler.send_header("Location", "http://127.0.0.1:1/")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def no_http(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.wfile.write(b"220 smtp.example\r\n")
    handler.close_connection = True


def silent(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    time.sleep(1.5)
    handler.close_connection = True


@pytest.mark.parametrize("answer", [wrong_bytes, too_many, cut_short, elsewhere, no_http, silent])
def test_a_mirror_that_fails_or_lies_has_nothing_and_then_rests(answer: Answer) -> None:
    first, second, _ = FILES
    with web_server(answer) as (url, asked), mirror_of(url, timeout_seconds=0.5) as mirror:
        mirror.fetch([first])
        assert collected(mirror, 1) == {first: None}
        assert mirror.problem
        mirror.fetch([second])
        assert collected(mirror, 1) == {second: None}
        assert len(asked) == 1, "it rests"


def trickle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b"x")
        time.sleep(0.05)


def slow_head(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    for _ in range(200):
        handler.wfile.write(b"x")
        time.sleep(0.05)


def always_continue(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    for _ in range(200):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.05)


def endless_trailers(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
    for _ in range(200):
        handler.wfile.write(b"X-More: x\r\n")
        time.sleep(0.05)


@pytest.mark.parametrize("answer", [trickle, slow_head, always_continue, endless_trailers])
def test_a_file_has_its_time_whatever_the_server_sends_meanwhile(answer: Answer) -> None:
    left = threading.Event()

    def until_left(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.close_connection = True
        try:
            answer(handler, body)
        except OSError:
            left.set()

    with web_server(until_left) as (url, _), mirror_of(url, timeout_seconds=0.3) as mirror:
        first = next(iter(FILES))
        mirror.fetch([first])
        assert collected(mirror, 1) == {first: None}
        assert left.wait(20), "it stayed to the end"


def rude(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    reason = b"\x1b]0;owned\x07\x1b[2J\xc2\x9b" + b"!" * 9999
    handler.wfile.write(b"HTTP/1.1 500 " + reason + b"\r\nContent-Length: 0\r\n\r\n")


def not_even_http(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.wfile.write(b"\x1b[31mround 7 counted" + b"!" * 9999 + b"\r\n")


@pytest.mark.parametrize("answer", [rude, not_even_http])
def test_what_a_server_says_is_told_as_one_printable_line(answer: Answer) -> None:
    with web_server(answer) as (url, _), mirror_of(url) as mirror:
        mirror.fetch(list(FILES)[:1])
        collected(mirror, 1)
        assert r"\x1b" in mirror.problem
        assert mirror.problem.isprintable() and len(mirror.problem) < 300


def test_files_that_fail_at_the_same_time_are_one_failure() -> None:
    now = [0.0]
    all_ask = threading.Barrier(len(FILES) + 1)
    fails = [True]

    def together(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if fails[0]:
            all_ask.wait(PATIENCE_SECONDS)
        (wrong_bytes if fails[0] else whole)(handler, body)

    with web_server(together) as (url, _), mirror_of(url, clock=lambda: now[0]) as mirror:
        mirror.fetch(FILES)
        all_ask.wait(PATIENCE_SECONDS)
        assert collected(mirror, len(FILES)) == dict.fromkeys(FILES)
        fails[0], now[0] = False, 31.0
        mirror.fetch(FILES)
        assert collected(mirror, len(FILES)) == FILES


def test_after_its_rest_it_is_asked_again() -> None:
    now = [0.0]
    fails = [True]

    def at_first_not(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        (wrong_bytes if fails[0] else whole)(handler, body)

    first = next(iter(FILES))
    with web_server(at_first_not) as (url, _), mirror_of(url, clock=lambda: now[0]) as mirror:
        mirror.fetch([first])
        assert collected(mirror, 1) == {first: None}
        fails[0], now[0] = False, 31.0
        mirror.fetch([first])
        assert collected(mirror, 1) == {first: FILES[first]}
        assert mirror.problem == ""


def test_a_connection_that_the_server_closed_meanwhile_is_made_again() -> None:
    def once(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        whole(handler, body)
        handler.close_connection = True  # without having said so

    with web_server(once) as (url, _), mirror_of(url) as mirror:
        for digest, body in FILES.items():
            mirror.fetch([digest])
            assert collected(mirror, 1) == {digest: body}


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with mirror_of(f"http://127.0.0.1:{taken.getsockname()[1]}") as mirror:
            mirror.fetch(FILES)
            assert collected(mirror, len(FILES)) == dict.fromkeys(FILES)


def test_a_name_with_an_address_that_swallows_connections_is_reached_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_up = socket.getaddrinfo
    first, second, _ = FILES
    with web_server() as (url, _), socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        with socket.create_connection(silent.getsockname()):  # its queue is full
            swallows = look_up(*silent.getsockname(), type=socket.SOCK_STREAM)

            def several(host: str, port: int, *rest: object, **more: object) -> list[object]:
                good = look_up("127.0.0.1", port, type=socket.SOCK_STREAM)
                return [*swallows, *good] if host == "two.example" else swallows * 400

            monkeypatch.setattr(socket, "getaddrinfo", several)
            two = url.replace("127.0.0.1", "two.example")
            with mirror_of(two, timeout_seconds=3.0) as mirror:
                mirror.fetch([first])
                assert collected(mirror, 1) == {first: FILES[first]}
            many = url.replace("127.0.0.1", "many.example")
            with mirror_of(many, timeout_seconds=0.5) as mirror:
                began = time.monotonic()
                mirror.fetch([second])
                assert collected(mirror, 1) == {second: None}
                assert time.monotonic() - began < PATIENCE_SECONDS, "all share half a second"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://host/",
        "http://",
        "https://user:secret@host/",
        "https://host/?a=b",
        "https://host/#a",
        "https://host:0/",
        "https://host:99999/",
        "https://h\u00f6st/",
        "https://host/a b",
        "https://host/\r\nHost: other",
        "https://[::1/",
    ],
)
def test_urls_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="mirror's URL"):
        parse_mirror_url(text)


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for each in (text, f"https://{text}"):
        try:
            url = parse_mirror_url(each)
        except ValueError as error:
            assert "mirror's URL" in str(error)
        else:
            assert url.host and 0 < url.port < 65_536 and not url.path.endswith("/")
