"""A way to a database that breaks exactly where a commit is asked for."""

from __future__ import annotations

import socket
import threading
import time
from typing import Literal

from tests.brokers.proxy import Proxy

Where = Literal["before", "after", "late"]


class CommitCut(Proxy):
    """The next commit after :meth:`arm` never arrives (``before``), is not answered (``after``), or
    arrives ``LATE_SECONDS`` after its connection ended (``late``). ``dead``: nothing passes."""

    LATE_SECONDS = 0.5

    def __init__(self, target_port: int) -> None:
        self._where: Where | None = None
        self._stays_dead = self.dead = False
        super().__init__(target_port)

    def arm(self, where: Where, *, stays_dead: bool = False) -> None:
        """``stays_dead``: no connection is let through from then on."""
        self._where, self._stays_dead = where, stays_dead

    def _forward(self, data: bytes, to: socket.socket) -> bool:
        if self.dead:
            return False
        if self._where is None or b"COMMIT\0" not in data:
            return super()._forward(data, to)
        where, self._where, self.dead = self._where, None, self._stays_dead
        if where == "after":
            to.sendall(data)
            to.recv(65_536)
        elif where == "late":
            kept = to.dup()  # stays open when the proxy closes its own
            threading.Thread(target=_send_late, args=(kept, data), daemon=True).start()
        return False


def _send_late(to: socket.socket, data: bytes) -> None:
    time.sleep(CommitCut.LATE_SECONDS)
    to.sendall(data)
    to.recv(65_536)
    to.close()
