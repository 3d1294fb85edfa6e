"""The head of an HTTP/1.1 answer: what a proxy or a WebSocket's server says before bytes flow."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
