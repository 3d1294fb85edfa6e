"""A broker that says exactly what a test wants, whatever it is told."""

from __future__ import annotations

import socket
import threading


class ScriptedBroker:
    """Answers CONNECT with ``connack`` (MQTT 5) and ``after``, and SUBSCRIBE with ``suback``."""

    def __init__(
        self,
        connack: bytes = b"\x20\x03\x00\x00\x00",
        after: bytes = b"",
        suback: bytes = b"",
    ) -> None:
        self._connack, self._after, self._suback = connack, after, suback
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.url = f"mqtt://127.0.0.1:{self._listener.getsockname()[1]}"
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ScriptedBroker:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._running = False
        self._thread.join(5)
        self._listener.close()

    def _run(self) -> None:
        while self._running:
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            with peer:
                peer.settimeout(0.5)
                try:
                    peer.recv(4096)
                    peer.sendall(self._connack + self._after)
                    if peer.recv(4096)[:1] == b"\x82":
                        peer.sendall(self._suback)
                        peer.recv(4096)
                except OSError:
                    continue
