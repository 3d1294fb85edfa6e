"""Wakes a thread that waits for sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable


class WakeUp:
    """A pair of sockets: any thread writes a byte, the waiting one sees it beside its own socket.

    One byte is enough until the waiting thread has said, by :meth:`rearm`, that it looks at
    everything anew. The byte stays where it is until then: what came before is looked at, and what
    comes after writes another, so between the two nothing can be missed.
    """

    def __init__(self) -> None:
        self.socket, self._write = socket.socketpair()
        """To wait for, on the waiting thread only; :meth:`rearm` reads it."""
        self.socket.setblocking(False)
        self._write.setblocking(False)
        self._lock = threading.Lock()
        self._awake = False

    def wake(self, *, again: bool = False) -> None:
        """Wake the thread, from any thread; ``again``: though nobody has said ``rearm``."""
        with self._lock:
            if self._awake and not again:
                return
            self._awake = True
            try:
                self._write.send(b"w")
            except OSError:
                return  # the buffer is full of wake-ups, or the sockets are closed

    def rearm(self) -> None:
        """Call before the first look at anything: what comes after it wakes the thread again."""
        with self._lock:
            if not self._awake:
                return
            self._awake = False
            try:
                self.socket.recv(4096)
            except BlockingIOError:
                return  # it was read while the thread slept

    def sleep(self, seconds: float, clock: Callable[[], float], until: Callable[[], bool]) -> None:
        """Sleep on the waiting thread; ``until`` ends it early, asked after each wake-up."""
        end_seconds = clock() + seconds
        while not until() and (left := end_seconds - clock()) > 0:
            self.socket.settimeout(left)
            try:
                self.socket.recv(4096)
            except TimeoutError:
                break
            finally:
                self.socket.setblocking(False)

    def close(self) -> None:
        """Close both sockets. May be called twice."""
        self.socket.close()
        self._write.close()
