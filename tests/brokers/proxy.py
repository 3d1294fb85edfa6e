"""A TCP proxy that can stop forwarding while both its connections stay open."""

from __future__ import annotations

import selectors
import socket
import threading


class Proxy:
    """Forwards 127.0.0.1:``port`` to ``target_port`` until ``freeze``; ``thaw`` goes on.

    Connections made while frozen are accepted and not forwarded.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.accepted = 0
        self._frozen = False
        self._running = True
        self._peers: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def freeze(self) -> None:
        self._frozen = True

    def thaw(self) -> None:
        """Cut what was frozen, and forward new connections."""
        self._frozen = False

    def stop(self) -> None:
        self._running = False
        self._thread.join(5)
        for sock in [self._listener, *self._peers]:
            sock.close()

    def _run(self) -> None:
        while self._running:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                if not self._frozen:
                    for sock in self._peers:
                        selector.register(sock, selectors.EVENT_READ)
                for key, _ in selector.select(0.02):
                    self._serve(key.fileobj)  # type: ignore[arg-type]

    def _serve(self, ready: socket.socket) -> None:
        if ready is self._listener:
            near, _ = ready.accept()
            self.accepted += 1
            try:
                far = socket.create_connection(("127.0.0.1", self._target_port), 2)
            except OSError:
                near.close()
                return
            self._peers[near], self._peers[far] = far, near
            return
        if ready not in self._peers:
            return
        try:
            data = ready.recv(65_536)
            if data and self._forward(data, self._peers[ready]):
                return
        except OSError:
            pass
        other = self._peers.pop(ready)
        del self._peers[other]
        ready.close()
        other.close()

    def _forward(self, data: bytes, to: socket.socket) -> bool:
        """Whether the connection goes on."""
        to.sendall(data)
        return True
