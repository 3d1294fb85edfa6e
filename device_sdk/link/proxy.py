"""The way to a broker through an HTTP proxy: CONNECT, then bytes as they are (RFC 9110, 9.3.6)."""

from __future__ import annotations

import base64
import socket
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from device_sdk.link.broker_url import BrokerUrl, authority

_MOST_BYTES = 8192
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpHead:
    """``reason`` at most 100 characters; ``headers`` by lower-case name, the last of each."""

    status: int
    reason: str
    headers: Mapping[str, str]

    def says(self, name: str, token: str) -> bool:
        """Whether a header lists a token, whatever their case."""
        listed = self.headers.get(name, "").lower().split(",")
        return token in (each.strip() for each in listed)


def parse_head(head: bytes) -> HttpHead:
    """Of the bytes before the empty line. Raises ConnectionError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status, _, reason = rest.partition(" ")
    if not (version.startswith("HTTP/1.") and len(status) == 3 and status.isdecimal()):
        raise ConnectionError("what answers there speaks no HTTP")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return HttpHead(int(status), reason[:100], headers)


def ask(
    stream: socket.socket, request: str, timeout_seconds: float, clock: Callable[[], float]
) -> tuple[HttpHead, bytes]:
    """Send a request's head; the answer's, and what came behind it.

    At most 8 KiB, and all of it within ``timeout_seconds``. Raises OSError.
    """
    end_seconds = clock() + timeout_seconds
    stream.settimeout(timeout_seconds)
    stream.sendall(request.encode("ascii"))
    received = bytearray()
    while (end := received.find(_END)) < 0:
        if len(received) > _MOST_BYTES:
            raise ConnectionError(f"an HTTP answer of more than {_MOST_BYTES} bytes")
        left = end_seconds - clock()
        if left <= 0:
            raise TimeoutError("no whole HTTP answer came in time")
        stream.settimeout(left)
        part = stream.recv(4096)
        if not part:
            raise ConnectionError("it hung up in place of an HTTP answer")
        received += part
    return parse_head(bytes(received[:end])), bytes(received[end + len(_END) :])


_EXAMPLE = "expected http://host:3128 or http://user:password@host:3128"


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy's address. ``repr`` and ``str`` leave the password out."""

    host: str
    port: int
    user: str | None = None
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"http://{authority(self.host, self.port)}"


def parse_proxy_url(text: str) -> Proxy:
    """Parse ``http://``, port 80 where none is given. Raises ValueError, which quotes nothing."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(f"the proxy's URL cannot be parsed; {_EXAMPLE}") from None
    if parts.scheme != "http":
        raise ValueError(
            f"a proxy's URL starts with http:// (what goes through it has a TLS of its own); "
            f"SOCKS and https:// proxies are not spoken; {_EXAMPLE}"
        )
    if not parts.hostname or port == 0:
        raise ValueError(f"the proxy's URL names no host, or port 0; {_EXAMPLE}")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"a proxy's URL ends after host and port; {_EXAMPLE}")
    if parts.password is not None and not parts.username:
        raise ValueError(f"the proxy's URL has a password but no user; {_EXAMPLE}")
    user = unquote(parts.username) if parts.username else None
    if user is not None and ":" in user:
        raise ValueError("a proxy's user has no colon in its name")
    return Proxy(parts.hostname, port or 80, user, unquote(parts.password or ""))


def proxy_for(url: BrokerUrl, given: str | None) -> Proxy | None:
    """The proxy to reach a broker through; None for the straight way.

    ``given``: its URL, empty for none. Where it is None, a WebSocket (``ws``, ``wss``) takes the
    environment's: ``HTTPS_PROXY``, else ``ALL_PROXY``, unless ``NO_PROXY`` lists the host. MQTT on
    the bare connection never does: few proxies let its ports through, and brokers beside the
    device are not behind one. Raises ValueError.
    """
    if given is not None or url.path is not None:
        return proxy_to(url.host, given)
    return None


def proxy_to(host: str, given: str | None) -> Proxy | None:
    """As :func:`proxy_for`, to a host that takes the environment's proxy where none is given."""
    if given is not None:
        return parse_proxy_url(given) if given else None
    if urllib.request.proxy_bypass(host):
        return None
    found = urllib.request.getproxies_environment()
    for kind in ("https", "all"):
        text = found.get(kind)
        if text:
            try:
                return parse_proxy_url(text if "://" in text else f"http://{text}")
            except ValueError as error:
                raise ValueError(
                    f"{kind.upper()}_PROXY in the environment cannot be used: {error}. Set "
                    "NO_PROXY for this host, or the link's proxy ('' for none)"
                ) from None
    return None


def tunnel(
    stream: socket.socket,
    proxy: Proxy,
    target: str,
    timeout_seconds: float,
    clock: Callable[[], float],
) -> None:
    """Have the proxy connect ``stream`` to ``target`` (host:port). Raises OSError, ValueError."""
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.user is not None:
        secret = base64.b64encode(f"{proxy.user}:{proxy.password}".encode()).decode()
        lines.append(f"Proxy-Authorization: Basic {secret}")
    request = "\r\n".join([*lines, "", ""])
    try:
        head, behind = ask(stream, request, timeout_seconds, clock)
    except OSError as error:
        raise ConnectionError(f"the proxy at {proxy}: {error}") from error
    if not 200 <= head.status < 300:
        hint = {
            403: ": it lets nobody to that host or port",
            405: ": it knows no CONNECT",
            407: ": give user and password in the proxy's URL",
        }.get(head.status, "")
        raise ConnectionError(
            f"the proxy at {proxy} refuses the way to {target} ({head.status} {head.reason}){hint}"
        )
    if behind:
        raise ConnectionError(f"the proxy at {proxy} says more than its answer")
