"""How the stream to a broker is made: TCP, straight or through a proxy, TLS, a WebSocket in it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import TypeAlias

from device_sdk.link.broker_url import BrokerUrl
from device_sdk.link.proxy import Proxy, tunnel
from device_sdk.link.websocket import WebSocket, upgrade

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
