"""A paho client that reads and writes many packets with one system call.

paho asks the socket for one byte, then for another, then for the rest, and sends each answer by
itself. Every such call lets another thread take the interpreter, and waiting to get it back takes
up to 5 ms: an aggregator that works on what came could not be fed fast enough.

Packets are cut here, before paho sees them. So a read has an end, however fast the broker sends,
and a publication that nobody wants costs a look at its topic.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeAlias

from paho.mqtt.client import Client

from device_sdk.link.dial import Stream

# Cuts a stream of MQTT packets into whole ones, and leaves out what nobody wants.

Admits: TypeAlias = Callable[[bytes], bool]
"""Whether to take a publication of this topic (UTF-8), asked in the order of arrival."""

_PUBLISH, _QOS_1, _QOS_2 = 0x30, 2, 4
_INCOMPLETE = -1


class PacketCutter:
    """Sans-io. ``admits``: which publications to pass on; None for all.

    Only lengths and topics are looked at: what is no packet at all is passed on as it is, for the
    one behind to refuse.
    """

    def __init__(self, admits: Admits | None = None) -> None:
        self._admits = admits
        self._held = b""
        self._place = 0  # of the first byte of ``_held`` that was not cut off yet
        self.more = False
        """Whether the next :meth:`cut` may find a packet though nothing was added."""

    def add(self, received: bytes) -> None:
        """Append what the socket brought."""
        self._held, self._place = self._held[self._place :] + received, 0

    def cut(self, most: int) -> tuple[bytes, bytes]:
        """The next whole packets, at most ``most`` of them, one behind the other; and the
        acknowledgements that are due for publications left out in between.
        """
        held, at, end = self._held, self._place, len(self._held)
        runs: list[bytes] = []
        answers = bytearray()
        run = at  # where the packets begin that are wanted, and follow each other
        packets = 0
        while packets < most and end - at >= 2:
            length, body = held[at + 1], at + 2
            if length > 127:
                length, body = _long_length(held, at, end)
                if length == _INCOMPLETE:
                    break
            after = body + length
            if after > end:
                break
            if self._admits is not None and held[at] & 0xF0 == _PUBLISH and not held[at] & _QOS_2:
                topic = body + 2 + int.from_bytes(held[body : body + 2], "big")
                if topic + 2 <= after and not self._admits(held[body + 2 : topic]):
                    if held[at] & _QOS_1:
                        answers += b"\x40\x02" + held[topic : topic + 2]
                    runs.append(held[run:at])
                    run = at = after
                    continue
            at = after
            packets += 1
        runs.append(held[run:at])
        self._place = at
        self.more = packets == most and at < end
        return b"".join(runs), bytes(answers)


def _long_length(held: bytes, at: int, end: int) -> tuple[int, int]:
    """A length of several bytes, and where the packet's body begins."""
    length = 0
    for place in range(4):
        if at + 1 + place >= end:
            return _INCOMPLETE, 0
        byte = held[at + 1 + place]
        length |= (byte & 127) << (7 * place)
        if byte < 128:
            return length, at + 2 + place
    return end - at - 1, at + 1  # no length at all


_MOST_PACKETS = 256
_WRITE_BYTES = 65_536


class BufferedClient(Client):
    """Use :meth:`read` and :meth:`write` in place of ``loop_read`` and ``loop_write``.

    ``read_bytes``: the most that one :meth:`read` takes from the socket. ``admits``: publications
    that it refuses are acknowledged and dropped; None takes all. ``dial``: makes the connection.

    Three methods of paho's own are replaced. Should another version not call two of them any more,
    packets move one by one again, and nothing else changes.
    """

    def __init__(
        self,
        *args: Any,
        dial: Callable[[], Stream],
        read_bytes: int = 65_536,
        admits: Admits | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self._dial = dial
        self._read_bytes = read_bytes
        self._cutter = PacketCutter(admits)
        self._ready = b""
        self._taken = 0  # of ``_ready``, by paho
        self._reading = False
        self._had_its_share = False
        self._behind = bytearray()
        self._gathering = False

    @property
    def has_read_ahead(self) -> bool:
        """Whether packets wait that were read already: ``select`` does not show these."""
        return self._cutter.more or self._taken < len(self._ready)

    @property
    def has_to_write(self) -> bool:
        """Whether bytes wait for the socket."""
        return bool(self._behind) or self.want_write()

    def read(self) -> None:
        """Handle what one read of the socket brings, and at most 256 packets of it.

        What is left is handled by the next call: between two there is time to write.
        """
        self._reading, self._had_its_share = True, False
        try:
            self.loop_read()
            before = -1
            while self._taken < len(self._ready) and self._taken != before:
                before = self._taken
                self.loop_read()
        finally:
            self._reading = False

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

    def _create_socket(self) -> Any:
        return self._dial()

    def _sock_recv(self, bufsize: int) -> bytes:
        if self._taken == len(self._ready):
            if self._reading and self._had_its_share:
                raise BlockingIOError
            if not self._cutter.more:
                received = self._receive()
                if not received:
                    return b""
                self._cutter.add(received)
            self._had_its_share = True
            self._ready, answers = self._cutter.cut(_MOST_PACKETS)
            self._taken = 0
            self._behind += answers
            if not self._ready:
                raise BlockingIOError
        taken = self._ready[self._taken : self._taken + bufsize]
        self._taken += len(taken)
        return taken

    def _receive(self) -> bytes:
        """What the socket has, at most ``read_bytes``; empty at its end."""
        received = super()._sock_recv(self._read_bytes)
        if not received or type(self.socket()) is socket.socket:
            return received
        parts, size = [received], len(received)
        while size < self._read_bytes:  # TLS gives one record of 16 KiB at a time
            try:
                part = super()._sock_recv(self._read_bytes - size)
            except OSError:
                break  # nothing more for now; what is broken is so at the next read too
            if not part:
                break
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    def _sock_send(self, buf: bytes | bytearray) -> int:
        if not self._gathering:
            if self._behind:
                raise BlockingIOError  # what was gathered goes first
            return super()._sock_send(buf)
        if len(self._behind) >= _WRITE_BYTES:
            raise BlockingIOError  # enough for one system call
        self._behind += buf
        return len(buf)
