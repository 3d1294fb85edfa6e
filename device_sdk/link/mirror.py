"""What everybody downloads, by its SHA-256 from any web server; the broker has it too."""

from __future__ import annotations

import hashlib
import http.client
import io
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from device_sdk.link.broker_url import authority
from device_sdk.link.dial import reach
from device_sdk.link.proxy import Proxy, proxy_to, tunnel
from device_sdk.system.printable import printable

_CONNECTIONS = 4
_IDLE_SECONDS = 10.0
_READ_BYTES = 16_384
_REST_SECONDS, _LONGEST_REST_SECONDS = 30.0, 900.0
_MOST_PROBLEM_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class MirrorUrl:
    """Where a mirror's files are: each named by the SHA-256 of what it holds, hexadecimal."""

    secure: bool
    host: str
    port: int
    path: str
    """With no slash at its end."""


def parse_mirror_url(text: str) -> MirrorUrl:
    """Parse ``http://`` or ``https://``, host, and perhaps port and path. Raises ValueError."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("the mirror's URL cannot be parsed") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError("a mirror's URL is http://HOST or https://HOST, port and path as needed")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("a mirror's URL has no user, query or fragment: anybody may read it")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("a mirror's URL is written in printable ASCII, without spaces")
    secure = parts.scheme == "https"
    return MirrorUrl(
        secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/")
    )


class Mirror:
    """Fetches on threads of its own, a few at once, and hands over what is what it should be.

    Any failure (no answer, another status than 200, other bytes) is a failure of everything that
    waits: the mirror rests then, for 30 seconds and up to 15 minutes as failures go on, and
    meanwhile answers at once that it has nothing. So a mirror that is down, or lies, costs its
    device little, and the broker is asked instead.

    Args:
        url: :func:`parse_mirror_url`'s text. Raises ValueError.
        most_bytes: of one file.
        clock: monotonic seconds.
        tls: for ``https://``; the system's authorities when None.
        proxy: as of :class:`~device_sdk.link.LinkSettings`; None: the environment's.
        timeout_seconds: for each file, the way to the server included.
        on_result: called on another thread when :meth:`take` has something.
    """

    def __init__(
        self,
        url: str,
        *,
        most_bytes: int,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
        proxy: str | None = None,
        timeout_seconds: float = 10.0,
        on_result: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = url
        self._parsed = parse_mirror_url(url)
        self._most_bytes, self._clock, self._timeout_seconds = most_bytes, clock, timeout_seconds
        self._tls = (tls or ssl.create_default_context()) if self._parsed.secure else None
        self._proxy = proxy_to(self._parsed.host, proxy)
        self._on_result = on_result
        self._wanted: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[bytes, bytes | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._stopped = False
        self._rest_seconds, self._rests_until = _REST_SECONDS, -1.0
        self.problem = ""
        """Why it rests; empty while it does not."""

    def fetch(self, digests: Iterable[bytes]) -> None:
        """Ask for files by their SHA-256, 32 bytes each; :meth:`take` tells of each of them."""
        if self._stopped or self._rests():
            for digest in digests:
                self._results.put((digest, None))
            self._on_result()
            return
        for digest in digests:
            self._wanted.put(digest)
            with self._lock:
                if self._threads < _CONNECTIONS:
                    self._threads += 1
                    threading.Thread(target=self._run, name="tessera-mirror", daemon=True).start()

    def take(self) -> list[tuple[bytes, bytes | None]]:
        """What came since the last call: digest and file; None for one that is not to be had."""
        found = []
        while not self._results.empty():
            found.append(self._results.get_nowait())
        return found

    def stop(self) -> None:
        """Fetch nothing more; threads end with what they have in hand."""
        self._stopped = True
        for _ in range(_CONNECTIONS):
            self._wanted.put(None)

    def _run(self) -> None:
        connection = _Connection(self._parsed, self._tls, self._proxy, self._clock)
        while True:
            try:
                digest = self._wanted.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                digest = None
            if digest is None:
                with self._lock:
                    # Whoever asks now starts another thread, or finds this one still counted.
                    if self._stopped or self._wanted.empty():
                        self._threads -= 1
                        break
                continue
            self._results.put((digest, self._fetched(connection, digest)))
            self._on_result()
        connection.close()

    def _fetched(self, connection: _Connection, digest: bytes) -> bytes | None:
        if self._rests():
            return None
        try:
            end_seconds = self._clock() + self._timeout_seconds
            body = connection.get(digest.hex(), self._most_bytes, end_seconds)
            if hashlib.sha256(body).digest() != digest:
                raise ConnectionError("what it has under a file's name is something else")
        except (OSError, ValueError, http.client.HTTPException) as error:
            # ValueError: a name that no look-up takes.
            connection.close()
            with self._lock:
                if not self._rests():  # what fails at the same time is one failure
                    said = f"{type(error).__name__}: {error}"
                    self.problem = printable(said, _MOST_PROBLEM_CHARACTERS)
                    self._rests_until = self._clock() + self._rest_seconds
                    self._rest_seconds = min(2 * self._rest_seconds, _LONGEST_REST_SECONDS)
            return None
        with self._lock:
            if not self._rests():
                self._rest_seconds, self.problem = _REST_SECONDS, ""
        return body

    def _rests(self) -> bool:
        return self._clock() < self._rests_until


class _Connection:
    """One that is kept for several files, and made again when the server has closed it."""

    def __init__(
        self,
        url: MirrorUrl,
        tls: ssl.SSLContext | None,
        proxy: Proxy | None,
        clock: Callable[[], float],
    ) -> None:
        self._url, self._tls, self._proxy, self._clock = url, tls, proxy, clock
        self._open: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def get(self, name: str, most_bytes: int, end_seconds: float) -> bytes:
        """A file, by ``end_seconds`` of the clock. Raises OSError, HTTPException."""

        def left_seconds() -> float:
            left = end_seconds - self._clock()
            if left <= 0:
                raise TimeoutError("it is too slow")
            return left

        while True:
            kept, self._open = self._open, None
            connection = kept or self._connected(left_seconds)
            connection.response_class = _answers_within(left_seconds)
            try:
                connection.request(
                    "GET",
                    f"{self._url.path}/{name}",
                    headers={"Accept-Encoding": "identity", "User-Agent": "tessera"},
                )
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if kept is None or isinstance(error, TimeoutError):
                    raise
                continue  # the server had closed what was kept
            break
        try:
            body = _body(answer, most_bytes)
        except BaseException:
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            self._open = connection
        return body

    def _connected(self, left_seconds: Callable[[], float]) -> http.client.HTTPConnection:
        url, reached = self._url, self._proxy or self._url
        stream = reach(reached.host, reached.port, left_seconds(), self._clock)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._proxy is not None:
                target = authority(url.host, url.port)
                tunnel(stream, self._proxy, target, left_seconds(), self._clock)
            stream.settimeout(left_seconds())
            if self._tls is not None:
                stream = self._tls.wrap_socket(stream, server_hostname=url.host)
        except BaseException:
            stream.close()
            raise
        kind = http.client.HTTPSConnection if url.secure else http.client.HTTPConnection
        connection = kind(url.host, url.port)
        connection.sock = stream
        return connection


def _answers_within(left_seconds: Callable[[], float]) -> type[http.client.HTTPResponse]:
    """Answers of which head, body and trailers have so much time together."""

    class TimedAnswer(http.client.HTTPResponse):
        def __init__(
            self,
            sock: socket.socket,
            debuglevel: int = 0,
            method: str | None = None,
            url: str | None = None,
        ) -> None:
            super().__init__(sock, debuglevel, method, url)
            self.fp = io.BufferedReader(_Timed(sock, self.fp.detach(), left_seconds))

    return TimedAnswer


class _Timed(io.RawIOBase):
    """What a socket reads, each time within the time that is left."""

    def __init__(
        self, sock: socket.socket, raw: io.RawIOBase, left_seconds: Callable[[], float]
    ) -> None:
        self._socket, self._raw, self._left_seconds = sock, raw, left_seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(self._left_seconds())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _body(answer: http.client.HTTPResponse, most_bytes: int) -> bytes:
    if answer.status != 200:
        raise ConnectionError(f"it answers {answer.status} {answer.reason}")
    body = bytearray()
    while part := answer.read1(_READ_BYTES):
        body += part
        if len(body) > most_bytes:
            raise ConnectionError(f"it sends more than {most_bytes} bytes")
    if answer.length:  # what the head announced and the body lacks
        raise ConnectionError("it hung up in the midst of a file")
    return bytes(body)
