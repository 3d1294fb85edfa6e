"""Cuts a stream of bytes into MQTT packets, without understanding more than their lengths."""

from __future__ import annotations

__all__ = ["CONNECT", "PINGREQ", "PUBLISH", "SUBSCRIBE", "Packets", "client_id", "kind"]

CONNECT, PUBLISH, SUBSCRIBE, PINGREQ = 1, 3, 8, 12
_MOST_LENGTH_BYTES = 4


class Packets:
    """Feed it what came; it gives whole packets. Bytes that are no MQTT come out as they are."""

    def __init__(self) -> None:
        self._buffer = b""
        self._is_garbled = False

    def feed(self, data: bytes) -> list[bytes]:
        """The packets that are whole now."""
        if self._is_garbled:
            return [data]
        self._buffer += data
        packets: list[bytes] = []
        while (length := self._length()) is not None:
            if length > len(self._buffer):
                break
            packets.append(self._buffer[:length])
            self._buffer = self._buffer[length:]
        if self._is_garbled:
            packets.append(self._buffer)
            self._buffer = b""
        return packets

    def _length(self) -> int | None:
        """Bytes of the packet that the buffer begins with; None while that is not known."""
        length, shift = 0, 0
        for place, byte in enumerate(self._buffer[1:], start=1):
            if place > _MOST_LENGTH_BYTES:
                self._is_garbled = True
                return None
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return place + 1 + length
        return None


def kind(packet: bytes) -> int:
    """The packet's type, 1 to 15."""
    return packet[0] >> 4 if packet else 0


def client_id(connect: bytes) -> str:
    """Who a CONNECT packet, 3.1.1 or 5, claims to be; empty if that cannot be read."""
    at = 1
    while at < len(connect) and connect[at] & 128:
        at += 1
    at += 1
    at += 2 + int.from_bytes(connect[at : at + 2], "big")  # "MQTT"
    version = connect[at : at + 1]
    at += 4  # version, flags, keepalive
    if version == b"\x05" and at < len(connect):
        at += 1 + connect[at]  # properties; ours are shorter than 128 bytes
    length = int.from_bytes(connect[at : at + 2], "big")
    return connect[at + 2 : at + 2 + length].decode("ascii", "replace")
