"""Cuts a stream of MQTT packets into whole ones, and leaves out what nobody wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Admits", "PacketCutter"]

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
