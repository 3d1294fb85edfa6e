"""A paho client that reads and writes many packets with one system call.

paho asks the socket for one byte, then for another, then for the rest, and sends each answer by
itself. Every such call lets another thread take the interpreter, and waiting to get it back takes
up to 5 ms: an aggregator that works on what came could not be fed fast enough.

Packets are cut here, before paho sees them. So a read has an end, however fast the broker sends,
and a publication that nobody wants costs a look at its topic. Publications are most of what there
is, in both directions, and paho takes a tenth of a millisecond for one: those without anything
special are read here, many to a call, and those of QoS 0 are written here. All else is paho's.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from paho.mqtt.client import Client
from paho.mqtt.enums import MQTTProtocolVersion

from device_sdk.link.dial import Stream
from device_sdk.link.events import Message

# Cuts a stream of MQTT packets into whole ones, and leaves out what nobody wants.

Admits: TypeAlias = Callable[[bytes], bool]
"""Whether to take a publication of this topic (UTF-8), asked in the order of arrival."""

_PUBLISH, _QOS_1, _QOS_2, _RETAINED = 0x30, 2, 4, 1
_PUBACK = b"\x40\x02"
_INCOMPLETE = -1


class PlainPublications(NamedTuple):
    """Publications that followed each other, and the acknowledgements that they are owed."""

    messages: list[Message]
    answers: bytearray


class PacketCutter:
    """Sans-io. ``admits``: which publications to pass on; None for all. ``five``: the packets are
    of MQTT 5.

    Only lengths and topics are looked at: what is no packet at all is passed on as it is, for the
    one behind to refuse.
    """

    def __init__(self, admits: Admits | None = None, *, five: bool = False) -> None:
        self._admits = admits
        self._five = five
        self._held = b""
        self._place = 0  # of the first byte of ``_held`` that was not cut off yet
        self.more = False
        """Whether the next :meth:`cut` may find a packet though nothing was added."""

    def add(self, received: bytes) -> None:
        """Append what the socket brought."""
        self._held, self._place = self._held[self._place :] + received, 0

    def cut(
        self, most: int, *, read: bool = False
    ) -> tuple[list[bytes | PlainPublications], bytes]:
        """The next whole packets, at most ``most`` of them, and the acknowledgements that are due
        for publications left out in between.

        Packets as they are, one behind the other. With ``read`` publications without properties
        are read, and stand in their place between the others; those of QoS 2, and those that are
        not as they should be, are not.
        """
        held, at, end = self._held, self._place, len(self._held)
        parts: list[bytes | PlainPublications] = []
        answers = bytearray()
        arrived: PlainPublications | None = None  # where the last packet was one of them
        run = at  # where the packets begin that are passed on as they are, and follow each other
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
            first = held[at]
            if first & 0xF0 == _PUBLISH and not first & _QOS_2:
                name = body + 2
                end_of_name = name + int.from_bytes(held[body:name], "big")
                start = end_of_name + (first & _QOS_1)  # behind the packet id, of two bytes
                if start <= after:
                    packet_id = held[end_of_name:start]
                    message = None
                    wanted = self._admits is None or self._admits(held[name:end_of_name])
                    if wanted and read:
                        message = self._read(first, held[name:end_of_name], start, after)
                        # Acknowledgements leave in the order of arrival: behind one of paho's all
                        # are.
                        read = message is not None
                    if message is not None or not wanted:
                        if run < at:
                            parts.append(held[run:at])
                            arrived = None
                        run = at = after
                        if message is None:
                            answers += _PUBACK + packet_id if packet_id else b""
                            continue
                        if arrived is None:
                            arrived = PlainPublications([], bytearray())
                            parts.append(arrived)
                        arrived.messages.append(message)
                        if packet_id:
                            arrived.answers.extend(_PUBACK + packet_id)
                        packets += 1
                        continue
            at = after
            packets += 1
        if run < at:
            parts.append(held[run:at])
        self._place = at
        self.more = packets == most and at < end
        return parts, bytes(answers)

    def _read(self, first: int, name: bytes, start: int, after: int) -> Message | None:
        """The publication, unless it is for paho to judge."""
        if self._five:
            if start >= after or self._held[start]:
                return None  # it has properties, or is none
            start += 1
        try:
            topic = name.decode()
        except UnicodeDecodeError:
            return None
        return Message(topic, self._held[start:after], bool(first & _RETAINED)) if topic else None


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
_FIRST_NUMBER = 65_536  # packet ids have two bytes


def _length(length: int) -> bytes:
    """As a packet's head has it: seven bits a byte, lowest first."""
    if length < 128:
        return bytes((length,))
    out = bytearray()
    while length > 127:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out)


class BufferedClient(Client):
    """Use :meth:`read`, :meth:`write` and :meth:`publish_once` in place of ``loop_read``,
    ``loop_write`` and ``publish`` at QoS 0.

    ``read_bytes``: the most that one :meth:`read` takes from the socket. ``admits``: publications
    that it refuses are acknowledged and dropped; None takes all. ``dial``: makes the connection.
    ``on_messages``: told of publications, those that followed each other together; paho's
    ``on_message`` of the few that only paho can read. ``on_written``: told which of those of
    :meth:`publish_once` the socket has taken.

    Three methods of paho's own are replaced. Should another version not call two of them any more,
    packets move one by one again, and nothing else changes.
    """

    def __init__(
        self,
        *args: Any,
        dial: Callable[[], Stream],
        read_bytes: int = 65_536,
        admits: Admits | None = None,
        on_messages: Callable[[list[Message]], None] | None = None,
        on_written: Callable[[list[int]], None] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self._dial = dial
        self._read_bytes = read_bytes
        self._five = settings.get("protocol") == MQTTProtocolVersion.MQTTv5
        self._cutter = PacketCutter(admits, five=self._five)
        self._on_messages = on_messages
        self._on_written = on_written
        self._parts: deque[bytes | PlainPublications] = deque()  # that were cut, and not taken
        self._ready = b""
        self._taken = 0  # of ``_ready``, by paho
        self._reading = False
        self._had_its_share = False
        self._behind = bytearray()
        self._gathering = False
        self._paho_owes = False  # acknowledgements, maybe, that wait behind others in its queue
        self._written_bytes = 0
        self._next_number = _FIRST_NUMBER
        self._unwritten: deque[tuple[int, int]] = deque()  # where in all bytes it ends, number

    @property
    def has_read_ahead(self) -> bool:
        """Whether packets wait that were read already: ``select`` does not show these."""
        return self._cutter.more or self._taken < len(self._ready) or bool(self._parts)

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
            before = None
            while (left := (len(self._parts), len(self._ready) - self._taken)) != before:
                before = left
                self.loop_read()
                if not self._parts and self._taken == len(self._ready):
                    return
        finally:
            self._reading = False

    def publish_once(self, topic: str, payload: bytes, retain: bool) -> int:
        """Append a publication at QoS 0 to what waits for the socket; its number, above all packet
        ids, for ``on_written``. The broker has accepted the connection."""
        name = topic.encode()
        head = len(name).to_bytes(2, "big") + name + (b"\x00" if self._five else b"")
        self._behind += bytes((_PUBLISH | retain,)) + _length(len(head) + len(payload)) + head
        self._behind += payload
        number = self._next_number
        self._next_number += 1
        self._unwritten.append((self._written_bytes + len(self._behind), number))
        return number

    def write(self) -> None:
        """Write all packets that wait, as far as the socket takes them. Raises OSError."""
        while self.has_to_write and self.socket() is not None:
            self._gathering = True
            try:
                self.loop_write()
            finally:
                self._gathering = False
            self._paho_owes = self.want_write()
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
            self._written_bytes += taken
            written = []
            while self._unwritten and self._unwritten[0][0] <= self._written_bytes:
                written.append(self._unwritten.popleft()[1])
            if written and self._on_written is not None:
                self._on_written(written)
        return not self._behind

    def _create_socket(self) -> Any:
        return self._dial()

    def _sock_recv(self, bufsize: int) -> bytes:
        while self._taken == len(self._ready):
            if not self._parts:
                if self._reading and self._had_its_share:
                    raise BlockingIOError
                if not self._cutter.more:
                    received = self._receive()
                    if not received:
                        return b""
                    self._cutter.add(received)
                self._had_its_share = True
                # Not what follows a CONNACK at once: nobody has been told of that yet.
                owed = self._paho_owes and self.want_write()
                read = self._reading and self._on_messages is not None and not owed
                parts, answers = self._cutter.cut(_MOST_PACKETS, read=read)
                self._parts.extend(parts)
                self._behind += answers
                if not self._parts:
                    raise BlockingIOError
            part = self._parts.popleft()
            if isinstance(part, bytes):
                self._ready, self._taken = part, 0
                self._paho_owes = True
            elif self._on_messages is not None:
                self._on_messages(part.messages)
                self._behind += part.answers
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
