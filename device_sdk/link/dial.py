"""How the stream to a broker is made: TCP, straight or through a proxy, TLS, a WebSocket in it."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from device_sdk.link.broker_url import BrokerUrl
from device_sdk.link.proxy import Proxy, ask, tunnel

_ACCEPT_SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x2, 0x8, 0x9, 0xA
_FINAL, _CONTROL, _MASKED = 0x80, 0x08, 0x80
_MOST_CONTROL_BYTES = 125


def write_frame(opcode: int, payload: bytes | bytearray, mask: bytes) -> bytes:
    """One whole frame of a client; ``mask``: 4 bytes that nobody can foretell."""
    size = len(payload)
    if size <= _MOST_CONTROL_BYTES:
        head = bytes([_FINAL | opcode, _MASKED | size])
    elif size < 1 << 16:
        head = bytes([_FINAL | opcode, _MASKED | 126]) + size.to_bytes(2, "big")
    else:
        head = bytes([_FINAL | opcode, _MASKED | 127]) + size.to_bytes(8, "big")
    plain = np.frombuffer(payload, np.uint8)
    masked = plain ^ np.resize(np.frombuffer(mask, np.uint8), size)
    return head + mask + masked.tobytes()


class FrameReader:
    """A server's frames in, their bytes out; sans-io. Holds no more than a control frame."""

    def __init__(self) -> None:
        self._held = b""
        self._left = 0  # bytes of the data frame in hand that have not come yet
        self._in_message = False
        self.ping: bytes | None = None
        """What the newest ping said that was not answered yet; whoever answers sets it to None."""
        self.closed = False
        """Whether the server has said goodbye: what follows is not looked at."""

    def read(self, received: bytes) -> bytes:
        """The payload that these bytes bring. Raises ConnectionError for what is no such frame."""
        data, at, payload = self._held + received, 0, bytearray()
        while not self.closed:
            if self._left:
                part = data[at : at + self._left]
                payload += part
                at += len(part)
                self._left -= len(part)
                if self._left:
                    break
            after = self._frame(data, at)
            if after is None:
                break
            at = after
        self._held = data[at:] if not self.closed else b""
        return bytes(payload)

    def _frame(self, data: bytes, at: int) -> int | None:
        """Take a frame's head, and all of a control frame; where it ends. None: not all is here."""
        if len(data) < at + 2:
            return None
        first, size = data[at], data[at + 1]
        opcode = first & 0x0F
        if first & 0x70 or size & _MASKED:
            raise ConnectionError("a WebSocket frame that is masked or of an unknown extension")
        control = bool(opcode & _CONTROL)
        if control and (size > _MOST_CONTROL_BYTES or not first & _FINAL):
            raise ConnectionError("a control frame of a WebSocket that is too long or not whole")
        body = at + 2
        if size >= 126:
            width = 2 if size == 126 else 8
            if len(data) < body + width:
                return None
            size = int.from_bytes(data[body : body + width], "big")
            body += width
            if size >> 63:
                raise ConnectionError("a WebSocket frame of an impossible length")
        if control:
            if len(data) < body + size:
                return None
            self._take_control(opcode, data[body : body + size])
            return body + size
        if opcode != (_CONTINUATION if self._in_message else _BINARY):
            raise ConnectionError("a WebSocket frame that is not binary, or out of order")
        self._in_message = not first & _FINAL
        self._left = size
        return body

    def _take_control(self, opcode: int, payload: bytes) -> None:
        if opcode == _CLOSE:
            self.closed = True
        elif opcode == _PING:
            self.ping = payload
        elif opcode != _PONG:
            raise ConnectionError("a control frame of a WebSocket of an unknown kind")


class WebSocket:
    """What paho and ``poll`` use of a socket, on an upgraded connection.

    ``behind``: what came behind the answer to the upgrade.
    """

    def __init__(self, stream: socket.socket, behind: bytes = b"") -> None:
        self._stream = stream
        self._reader = FrameReader()
        self._payload = bytearray(self._reader.read(behind))
        self._frame = b""  # what the stream has not taken yet of the frame in hand
        self._framed = 0  # the bytes that this frame carries

    def recv(self, most: int) -> bytes:
        """As of a socket; empty at the end. Raises BlockingIOError where no payload has come."""
        if not self._payload and not self._reader.closed:
            received = self._stream.recv(most)
            if not received:
                return b""
            self._payload += self._reader.read(received)
            self._answer()
        if not self._payload and not self._reader.closed:
            raise BlockingIOError
        taken = bytes(self._payload[:most])
        del self._payload[:most]
        return taken

    def send(self, data: bytes | bytearray) -> int:
        """As of a socket. A call that raised BlockingIOError is followed by one with the same data,
        or more behind it."""
        if not self._frame:
            self._answer()
        if not self._frame:
            self._frame, self._framed = write_frame(_BINARY, data, os.urandom(4)), len(data)
        self._push()
        if self._frame:
            raise BlockingIOError
        return self._framed

    def pending(self) -> int:
        """Bytes that were read already, and that ``poll`` does not show."""
        stream = self._stream
        return len(self._payload) + (stream.pending() if isinstance(stream, ssl.SSLSocket) else 0)

    def fileno(self) -> int:
        return self._stream.fileno()

    def setblocking(self, flag: bool) -> None:
        self._stream.setblocking(flag)

    def close(self) -> None:
        """Say goodbye, if the stream takes that at once, and close it."""
        if not self._frame:
            try:
                self._stream.setblocking(False)
                self._stream.send(write_frame(_CLOSE, b"\x03\xe8", os.urandom(4)))
            except OSError:
                pass  # it is gone, or does not listen
        self._stream.close()

    def _answer(self) -> None:
        """Answer a ping, where no frame is in hand; else the next call does."""
        if self._reader.ping is None or self._frame:
            return
        self._frame, self._framed = write_frame(_PONG, self._reader.ping, os.urandom(4)), 0
        self._reader.ping = None
        try:
            self._push()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return  # the next frame waits behind it

    def _push(self) -> None:
        self._frame = self._frame[self._stream.send(self._frame) :]


def upgrade(
    stream: socket.socket, url: BrokerUrl, timeout_seconds: float, clock: Callable[[], float]
) -> WebSocket:
    """Ask the server for a WebSocket that carries MQTT. Raises OSError."""
    key = base64.b64encode(os.urandom(16))
    usual = 443 if url.tls else 80
    host = url.authority.removesuffix(f":{usual}")
    request = "\r\n".join(
        [
            f"GET {url.path} HTTP/1.1",
            f"Host: {host}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key.decode()}",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Protocol: mqtt",
            "",
            "",
        ]
    )
    head, behind = ask(stream, request, timeout_seconds, clock)
    if head.status != 101:
        raise ConnectionError(
            f"{url} is no WebSocket ({head.status} {head.reason}): is the path right?"
        )
    digest = hashlib.sha1(key + _ACCEPT_SUFFIX, usedforsecurity=False).digest()
    if not (
        head.says("upgrade", "websocket")
        and head.says("connection", "upgrade")
        and head.headers.get("sec-websocket-accept") == base64.b64encode(digest).decode()
    ):
        raise ConnectionError(f"{url} answers the upgrade to a WebSocket with something else")
    protocol = head.headers.get("sec-websocket-protocol", "mqtt")
    if protocol.lower() != "mqtt" or "sec-websocket-extensions" in head.headers:
        raise ConnectionError(f"the WebSocket at {url} does not carry MQTT as it was asked to")
    return WebSocket(stream, behind)


Stream: TypeAlias = socket.socket | WebSocket
"""An ``ssl.SSLSocket`` among them."""


def dial(
    url: BrokerUrl,
    tls: ssl.SSLContext | None,
    proxy: Proxy | None,
    timeout_seconds: float,
    clock: Callable[[], float],
) -> Stream:
    """Connect; each of the steps has ``timeout_seconds``. Raises OSError, ``ssl.SSLError`` too."""
    stream = _connected(url, proxy, timeout_seconds)
    try:
        # Small packets each way: Nagle's wait for more would add 40 ms to every receipt.
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if proxy is not None:
            tunnel(stream, proxy, url.authority, timeout_seconds, clock)
        if tls is not None:
            stream.settimeout(timeout_seconds)
            stream = tls.wrap_socket(stream, server_hostname=url.host)
        if url.path is not None:
            return upgrade(stream, url, timeout_seconds, clock)
    except BaseException:
        stream.close()
        raise
    return stream


def _connected(url: BrokerUrl, proxy: Proxy | None, timeout_seconds: float) -> socket.socket:
    if proxy is None:
        return socket.create_connection((url.host, url.port), timeout_seconds)
    try:
        return socket.create_connection((proxy.host, proxy.port), timeout_seconds)
    except OSError as error:
        raise ConnectionError(f"the proxy at {proxy} cannot be reached: {error}") from error


def reach(
    host: str, port: int, timeout_seconds: float, clock: Callable[[], float]
) -> socket.socket:
    """TCP to the first of a name's addresses that answers; they share the time. Raises OSError."""
    end_seconds = clock() + timeout_seconds
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failed: OSError = ConnectionError(f"{host} has no address")
    for left, (family, kind, protocol, _, address) in zip(
        range(len(addresses), 0, -1), addresses, strict=True
    ):
        share_seconds = (end_seconds - clock()) / left
        if share_seconds <= 0:
            raise TimeoutError(f"none of {host}'s addresses answers in time")
        stream = socket.socket(family, kind, protocol)
        try:
            stream.settimeout(share_seconds)
            stream.connect(address)
        except OSError as error:
            stream.close()
            failed = error
        else:
            return stream
    raise failed


def unseen(stream: Stream) -> int:
    """Bytes that were taken off the network already, and that ``poll`` does not show."""
    return stream.pending() if isinstance(stream, ssl.SSLSocket | WebSocket) else 0
