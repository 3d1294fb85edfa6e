"""A paho client that reads and writes many packets with one system call.

paho asks the socket for one byte, then for another, then for the rest, and sends each answer by
itself. Every such call lets another thread take the interpreter, and waiting to get it back takes
up to 5 ms: an aggregator that works on what came could not be fed fast enough.
"""

from __future__ import annotations

from typing import Any

from paho.mqtt.client import Client

__all__ = ["BufferedClient"]

_READ_BYTES = 65_536
_WRITE_BYTES = 65_536


class BufferedClient(Client):
    """Use :meth:`read` and :meth:`write` in place of ``loop_read`` and ``loop_write``.

    Two methods of paho's own are replaced. Should another version not call them any more, packets
    move one by one again, and nothing else changes.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._ahead = b""
        self._place = 0  # of the first byte of ``_ahead`` that no packet took yet
        self._behind = bytearray()
        self._gathering = False

    @property
    def has_read_ahead(self) -> bool:
        """Whether bytes were read that no packet was made of: ``select`` does not show these."""
        return self._place < len(self._ahead)

    @property
    def has_to_write(self) -> bool:
        """Whether bytes wait for the socket."""
        return bool(self._behind) or self.want_write()

    def read(self) -> None:
        """Handle all packets that one read of the socket brings."""
        self.loop_read()
        before = -1
        while self.has_read_ahead and self.socket() is not None and self._place != before:
            before = self._place
            self.loop_read()

    def write(self) -> None:
        """Write all packets that wait, as far as the socket takes them. Raises OSError."""
        while self.has_to_write and self.socket() is not None:
            self._gathering = True
            try:
                self.loop_write()
            finally:
                self._gathering = False
            if not self._write_behind():
                return

    def say_goodbye(self) -> None:
        """Write what waits and a DISCONNECT, if the socket takes it at once. Raises OSError."""
        self.write()
        self.disconnect()
        # Not gathered: with the last byte of a DISCONNECT paho closes the socket.
        self.loop_write()

    def _write_behind(self) -> bool:
        """Whether the socket took all that was gathered."""
        if self._behind and self.socket() is not None:
            try:
                taken = super()._sock_send(self._behind)
            except BlockingIOError:
                return False
            del self._behind[:taken]
        return not self._behind

    def _sock_recv(self, bufsize: int) -> bytes:
        if not self.has_read_ahead:
            self._ahead, self._place = super()._sock_recv(_READ_BYTES), 0
        taken = self._ahead[self._place : self._place + bufsize]
        self._place += len(taken)
        return taken

    def _sock_send(self, buf: bytes | bytearray) -> int:
        if not self._gathering:
            if self._behind:
                raise BlockingIOError  # what was gathered goes first
            return super()._sock_send(buf)
        if len(self._behind) >= _WRITE_BYTES:
            raise BlockingIOError  # enough for one system call
        self._behind += buf
        return len(buf)
