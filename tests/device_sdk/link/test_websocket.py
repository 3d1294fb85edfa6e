"""MQTT in WebSockets and through HTTP proxies, against a real Mosquitto and a real proxy."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.link.broker_url import TlsFiles, parse_broker_url
from device_sdk.link.dial import FrameReader, WebSocket, upgrade, write_frame
from device_sdk.link.events import Connected, Disconnected, Message, Outcome, Subscribed
from device_sdk.link.link import Link
from device_sdk.link.proxy import Proxy, parse_proxy_url, proxy_for
from device_sdk.link.settings import LinkSettings
from tests.brokers.amqtt_broker import running_amqtt
from tests.brokers.authority import Authority
from tests.brokers.connect_proxy import ConnectProxy
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK, SUSPICIOUS, MakeLink, await_event
from tests.brokers.mosquitto import free_port, websocket_lines
from tests.fakes.waiting import PATIENCE_SECONDS

# Mosquitto 2.0 writes 4 KiB to a WebSocket every tenth of a second, however fast we read.
PATIENT = replace(QUICK, stall_seconds=5.0)


def through(proxy: str) -> LinkSettings:
    return replace(PATIENT, proxy=proxy)


# Frames.


def served(opcode: int, payload: bytes, final: bool = True) -> bytes:
    """A frame as a server sends it."""
    size, head = len(payload), bytes([opcode | (0x80 if final else 0)])
    if size < 126:
        return head + bytes([size]) + payload
    if size < 1 << 16:
        return head + b"\x7e" + size.to_bytes(2, "big") + payload
    return head + b"\x7f" + size.to_bytes(8, "big") + payload


@given(st.lists(st.binary(max_size=300), max_size=6), st.integers(1, 50), st.data())
def test_any_cut_of_any_frames_gives_the_same_bytes(
    payloads: list[bytes], size: int, data: st.DataObject
) -> None:
    stream = b""
    for payload in payloads:
        middle = data.draw(st.integers(0, len(payload)))
        stream += served(2, payload[:middle], final=False) + served(9, b"are you there")
        stream += served(0, payload[middle:])
    reader = FrameReader()
    parts = [reader.read(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert b"".join(parts) == b"".join(payloads)
    assert reader.ping == (b"are you there" if payloads else None)


@pytest.mark.parametrize(
    "frame",
    [
        served(1, b"text"),
        served(0, b"the middle of nothing"),
        served(2, b"a", final=False) + served(2, b"b"),
        served(2 | 0x40, b"compressed"),
        served(3, b"a kind to come"),
        served(11, b"a kind to come"),
        served(9, bytes(126)),
        served(9, b"half", final=False),
        write_frame(2, b"masked", b"1234"),
        b"\x82\x7f" + b"\xff" * 8,
    ],
)
def test_what_is_no_frame_of_a_server_ends_the_connection(frame: bytes) -> None:
    with pytest.raises(ConnectionError):
        FrameReader().read(frame)


def test_a_frame_that_promises_exabytes_is_passed_on_as_it_comes() -> None:
    reader = FrameReader()
    assert reader.read(b"\x82\x7f" + (1 << 62).to_bytes(8, "big")) == b""
    for _ in range(50):
        assert reader.read(bytes(1000)) == bytes(1000)
    assert len(reader._held) == 0


def test_a_ping_is_answered_masked_and_never_inside_another_frame() -> None:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    near.setblocking(False)
    with near, far:
        stream = WebSocket(near)
        far.sendall(served(9, b"hello"))
        with pytest.raises(BlockingIOError):
            stream.recv(100)
        assert _unmasked(far.recv(100)) == [(0x8A, b"hello")]

        data = np.random.default_rng(3).bytes(60_000)
        with pytest.raises(BlockingIOError):
            stream.send(data)  # more than the socket takes
        far.sendall(served(9, b"again") + served(2, b"payload"))
        assert stream.recv(100) == b"payload"
        far.settimeout(1)
        came = bytearray(far.recv(1 << 20))
        taken = 0
        while not taken:
            try:
                taken = stream.send(data + b"more")
            except BlockingIOError:
                came += far.recv(1 << 20)
        assert taken == len(data)
        assert stream.send(b"more") in (0, 4)
        time.sleep(0.05)
        far.setblocking(False)
        came += far.recv(1 << 20)
        frames = _unmasked(bytes(came))
        assert frames[:2] == [(0x82, data), (0x8A, b"again")]


def _unmasked(stream: bytes) -> list[tuple[int, bytes]]:
    """A client's frames: first byte and payload. Each must be masked."""
    frames = []
    while stream:
        first, size = stream[0], stream[1]
        assert size & 0x80
        size, at = size & 0x7F, 2
        if size >= 126:
            width = 2 if size == 126 else 8
            size, at = int.from_bytes(stream[2 : 2 + width], "big"), 2 + width
        mask, body = stream[at : at + 4], stream[at + 4 : at + 4 + size]
        frames.append((first, bytes(b ^ mask[n % 4] for n, b in enumerate(body))))
        stream = stream[at + 4 + size :]
    return frames


# The upgrade.


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that says so to whoever comes; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            try:
                while True:
                    near, _ = listener.accept()
                    with near:
                        near.recv(4096)
                        near.sendall(answer)
                        near.settimeout(PATIENCE_SECONDS)
                        near.recv(1)
            except OSError:
                return

        threading.Thread(target=run, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "is no WebSocket (404 Not Found): is the path right"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "is no WebSocket (200 OK)"),
        (b"\x20\x02\x00\x00\r\n\r\n", "speaks no HTTP"),
        (b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", "something else"),
        (b"HTTP/1.1 101 X\r\n" + b"a: b\r\n" * 5000, "more than 8192 bytes"),
        (b"HTTP/1.1 101", "no whole HTTP answer came in time|timed out"),
    ],
)
def test_what_answers_an_upgrade_otherwise_is_told_in_words(
    answer: bytes, said: str, make_link: MakeLink
) -> None:
    with answering(answer) as port:
        link = make_link(f"ws://127.0.0.1:{port}/mqtt", SUSPICIOUS)
        lost = await_event(link, Disconnected)
    assert lost.reason == "unreachable"
    assert any(each in lost.detail for each in said.split("|"))


def test_an_answer_that_trickles_is_given_up_in_time() -> None:
    near, far = socket.socketpair()
    going = True

    def trickle() -> None:
        while going:
            far.sendall(b"a")
            time.sleep(0.02)

    thread = threading.Thread(target=trickle, daemon=True)
    with near, far:
        thread.start()
        with pytest.raises(TimeoutError):
            upgrade(near, parse_broker_url("ws://x"), 0.3, time.monotonic)
        going = False
        thread.join(5)


# Brokers.


def there_and_back(link: Link, size: int) -> None:
    payload = np.random.default_rng(size).bytes(size)
    assert link.publish("a", payload).wait(PATIENCE_SECONDS) is Outcome.ACKNOWLEDGED
    assert await_event(link, Message).payload == payload


def test_messages_of_all_sizes_there_and_back_and_again_after_the_broker_died(
    make_mosquitto: MakeMosquitto, make_link: MakeLink
) -> None:
    port = free_port()
    broker = make_mosquitto(*websocket_lines(port))
    link = make_link(f"ws://127.0.0.1:{port}/mqtt", PATIENT, subscriptions=("a",))
    await_event(link, Subscribed)
    for size in (0, 1, 125, 126, 30_000):
        there_and_back(link, size)
    broker.kill()
    await_event(link, Disconnected)
    broker.start()
    await_event(link, Connected)
    await_event(link, Subscribed)
    many = [link.publish("a", b"%d" % number) for number in range(30)]
    assert [await_event(link, Message).payload for _ in many] == [
        b"%d" % number for number in range(30)
    ]


def test_large_messages_at_another_broker(make_link: MakeLink) -> None:
    pytest.importorskip("amqtt")
    with running_amqtt("ws") as url:
        link = make_link(url, PATIENT, subscriptions=("a",))
        await_event(link, Subscribed)
        for size in (65_520, 66_000, 130_000):
            there_and_back(link, size)


def test_tls_websocket_through_a_proxy_that_asks_who_we_are(
    make_mosquitto: MakeMosquitto, make_link: MakeLink, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    port = free_port()
    make_mosquitto(*websocket_lines(port), f"certfile {certificate}", f"keyfile {key}")
    url, tls = f"wss://127.0.0.1:{port}/mqtt", TlsFiles(authority.ca_file)
    with ConnectProxy("anna:s:ecret") as proxy:
        login = proxy.url.replace("//", "//anna:s%3Aecret@")
        link = make_link(url, through(login), tls, subscriptions=("a",))
        await_event(link, Subscribed)
        there_and_back(link, 20_000)
        assert proxy.targets == [f"127.0.0.1:{port}"]

        unnamed = await_event(make_link(url, through(proxy.url), tls), Disconnected)
        assert "407 Proxy Authentication Required): give user and password" in unnamed.detail
        stranger = TlsFiles(Authority(tmp_path, "other authority").ca_file)
        assert await_event(make_link(url, through(login), stranger), Disconnected).reason == "tls"


def test_plain_mqtt_through_a_proxy(make_mosquitto: MakeMosquitto, make_link: MakeLink) -> None:
    broker = make_mosquitto()
    with ConnectProxy() as proxy:
        link = make_link(broker.url, through(proxy.url), subscriptions=("a",))
        await_event(link, Subscribed)
        link.publish("a", b"there")
        assert await_event(link, Message).payload == b"there"
        assert proxy.targets == [f"127.0.0.1:{broker.port}"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.0 403 Forbidden\r\n\r\n", "(403 Forbidden): it lets nobody to that host or port"),
        (b"SSH-2.0-x\r\n\r\n", "speaks no HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\n\x20\x02\x00\x00", "says more than its answer"),
    ],
)
def test_what_a_proxy_says_instead_is_told_in_words(
    answer: bytes, said: str, make_link: MakeLink
) -> None:
    with ConnectProxy(answer=answer) as proxy:
        link = make_link("mqtt://127.0.0.1:1", through(proxy.url))
        assert said in await_event(link, Disconnected).detail


def test_a_proxy_that_is_not_there_is_named(make_link: MakeLink) -> None:
    link = make_link("mqtt://127.0.0.1", through(f"http://u:secret@127.0.0.1:{free_port()}"))
    detail = await_event(link, Disconnected).detail
    assert "the proxy at http://127.0.0.1:" in detail and "secret" not in detail


# Which proxy.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("socks5://proxy:1080", "SOCKS"),
        ("https://proxy", "starts with http://"),
        ("proxy:3128", "starts with http://"),
        ("http://", "names no host"),
        ("http://proxy:0", "port 0"),
        ("http://proxy:99999", "cannot be parsed"),
        ("http://proxy/path", "ends after host and port"),
        ("http://:secret@proxy", "a password but no user"),
        ("http://a%3Ab:secret@proxy", "no colon"),
    ],
)
def test_a_proxy_s_url_that_cannot_be_used_is_refused_unquoted(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        LinkSettings(proxy=text)
    assert "secret" not in str(refused.value)


def test_the_environment_s_proxy_is_for_websockets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "all_proxy", "no_proxy", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    secure, plain = (
        parse_broker_url("wss://broker.example"),
        parse_broker_url("ws://broker.example"),
    )
    bare = parse_broker_url("mqtts://broker.example")
    assert proxy_for(secure, None) is None
    monkeypatch.setenv("ALL_PROXY", "proxy:3128")
    assert proxy_for(secure, None) == proxy_for(plain, None) == Proxy("proxy", 3128)
    monkeypatch.setenv("HTTPS_PROXY", "http://u:p@second")
    assert proxy_for(secure, None) == Proxy("second", 80, "u", "p")
    assert proxy_for(bare, None) is None
    assert proxy_for(secure, "") is None
    assert proxy_for(bare, "http://[::1]:1") == Proxy("::1", 1) == parse_proxy_url("http://[::1]:1")
    monkeypatch.setenv("NO_PROXY", "other.example,.example")
    assert proxy_for(secure, None) is None
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("HTTPS_PROXY", "socks5://u:secret@second")
    with pytest.raises(ValueError, match="HTTPS_PROXY in the environment cannot be used") as told:
        proxy_for(secure, None)
    assert "secret" not in str(told.value)
    assert proxy_for(bare, None) is None


def test_no_password_of_a_proxy_is_shown() -> None:
    proxy = parse_proxy_url("http://u:secret@p:1")
    assert "secret" not in f"{proxy} {proxy!r} {LinkSettings(proxy='http://u:secret@p:1')!r}"
