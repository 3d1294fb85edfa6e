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


def unseen(stream: Stream) -> int:
    """Bytes that were taken off the network already, and that ``poll`` does not show."""
    return stream.pending() if isinstance(stream, ssl.SSLSocket | WebSocket) else 0
