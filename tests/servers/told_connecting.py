"""A way to a database on which a notification always comes in the midst of connecting."""

from __future__ import annotations

import socket
from collections.abc import Callable

from tests.brokers.proxy import Proxy

_READY = b"Z\0\0\0\5I"
_NOTIFICATION = b"A\0\0\0"


class ToldConnecting(Proxy):
    """Whoever begins to listen gets the answer together with the first notification, which
    ``notify`` makes another connection send."""

    def __init__(self, target_port: int, notify: Callable[[], object]) -> None:
        self._notify = notify
        self.times = 0
        super().__init__(target_port)

    def _forward(self, data: bytes, to: socket.socket) -> bool:
        to.sendall(data)
        if b"LISTEN " not in data:
            return True
        answer = b""
        while not answer.endswith(_READY):
            answer += to.recv(65_536)
        self._notify()
        while _NOTIFICATION not in answer.rpartition(_READY)[2]:
            answer += to.recv(65_536)
        self.times += 1
        self._peers[to].sendall(answer)
        return True
