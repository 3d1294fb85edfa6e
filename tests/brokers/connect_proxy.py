"""An HTTP proxy that knows CONNECT and nothing else."""

from __future__ import annotations

import base64
import socket
import threading
from contextlib import suppress


class ConnectProxy:
    """On 127.0.0.1:``port``; use with ``with``. ``login``: ``user:password``, if it asks for one.

    ``answer``: said in place of connecting, whoever asks.
    """

    def __init__(self, login: str = "", answer: bytes = b"") -> None:
        self._wanted = base64.b64encode(login.encode()).decode() if login else ""
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.targets: list[str] = []
        """host:port of each request that was granted."""
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run, daemon=True)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ConnectProxy:
        self._threads[0].start()
        return self

    def __exit__(self, *details: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._open):
            sock.close()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(near)
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near:
            head = b""
            while b"\r\n\r\n" not in head:
                part = near.recv(4096)
                if not part:
                    return
                head += part
            first, *lines = head.decode("ascii").split("\r\n")
            method, target, version = first.split(" ")
            if (method, version) != ("CONNECT", "HTTP/1.1") or f"Host: {target}" not in lines:
                near.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            elif self._wanted and f"Proxy-Authorization: Basic {self._wanted}" not in lines:
                near.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            elif self._answer:
                near.sendall(self._answer)
            else:
                self._connect(near, target)

    def _connect(self, near: socket.socket, target: str) -> None:
        host, _, port = target.rpartition(":")
        try:
            far = socket.create_connection((host, int(port)), 5)
        except OSError:
            near.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            return
        far.settimeout(None)
        self.targets.append(target)
        self._open.append(far)
        near.sendall(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n")
        back = threading.Thread(target=_pour, args=(far, near), daemon=True)
        back.start()
        _pour(near, far)
        back.join(5)
        far.close()


def _pour(source: socket.socket, drain: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            drain.sendall(data)
    with suppress(OSError):
        drain.shutdown(socket.SHUT_RDWR)
