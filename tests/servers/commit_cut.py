"""Ways to a database that break exactly where a commit is asked for, or at any byte around it."""

from __future__ import annotations

import math
import socket
import threading
import time
from contextlib import suppress
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


Way = Literal["server", "client"]


class ByteCut(Proxy):
    """Breaks a conversation after so many bytes one way, and can lead to another server.

    ``passed``: bytes to each end since :meth:`arm`; ``before_commit``: how many of them had passed
    when a commit was asked for. ``has_cut``: whether the armed cut was made.
    """

    def __init__(self, target_port: int) -> None:
        self.arm("server", math.inf)
        super().__init__(target_port)

    def arm(self, way: Way, after_bytes: float) -> None:
        """The connection that takes more than so many bytes to one end is cut there."""
        self._way, self._left = way, after_bytes
        self.passed: dict[Way, int] = {"server": 0, "client": 0}
        self.before_commit: dict[Way, int] = {}
        self.has_cut = False

    def lead_to(self, port: int) -> None:
        """End all connections; whoever comes from now on is led there."""
        self._target_port = port
        for sock in list(self._peers):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _forward(self, data: bytes, to: socket.socket) -> bool:
        way: Way = "server" if to.getpeername()[1] == self._target_port else "client"
        if b"COMMIT\0" in data and way == "server":
            self.before_commit = dict(self.passed)
        self.passed[way] += len(data)
        if self.has_cut or way != self._way:
            return super()._forward(data, to)
        if len(data) <= self._left:
            self._left -= len(data)
            return super()._forward(data, to)
        self.has_cut = True
        to.sendall(data[: int(self._left)])
        return False
