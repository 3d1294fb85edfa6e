"""Just enough of MQTT 3.1.1 for hundreds of connections on one selector. For load, not for use."""

from __future__ import annotations

import socket
from collections.abc import Iterator

_PUBLISH, _PUBACK = 0x30, 0x40


class MiniClient:
    """One connection. ``received`` yields (topic, payload) of publications, and answers them."""

    def __init__(self, port: int, client_id: str, account: tuple[str, str] | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._next_id = 0
        self.received_bytes = 0
        """Above TCP, since it connected."""
        self.socket.sendall(connect_packet(client_id, account))
        self._await(0x20)

    def subscribe(self, topic: str) -> None:
        """Subscribe at QoS 1 and wait for the answer."""
        self.socket.sendall(_packet(0x82, self._id() + _text(topic) + b"\x01"))
        self._await(0x90)

    def publish(self, topic: str, payload: bytes) -> None:
        """Send at QoS 1; the acknowledgement is read and forgotten."""
        self.socket.sendall(_packet(_PUBLISH | 2, _text(topic) + self._id() + payload))

    def retain(self, topic: str, payload: bytes) -> None:
        """Leave it at the broker for whoever subscribes, and wait for the acknowledgement."""
        self.socket.sendall(_packet(_PUBLISH | 3, _text(topic) + self._id() + payload))
        self._await(_PUBACK)

    def received(self) -> Iterator[tuple[str, bytes]]:
        """What has come; call when the socket is readable."""
        try:
            # The socket blocks, so that a full one delays a publication instead of cutting it off.
            data = self.socket.recv(262_144, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("the broker closed the connection")
            self._buffer += data
            self.received_bytes += len(data)
        except BlockingIOError:
            pass  # what came before an answer that was waited for is there still
        while (packet := self._take()) is not None:
            kind, body = packet
            if kind & 0xF0 != _PUBLISH:
                continue
            end = 2 + int.from_bytes(body[:2], "big")
            topic = body[2:end].decode()
            if kind & 6:
                self.socket.sendall(_packet(_PUBACK, body[end : end + 2]))
                end += 2
            yield topic, body[end:]

    def _take(self) -> tuple[int, bytes] | None:
        length, shift, at = 0, 0, 1
        while True:
            if at >= len(self._buffer):
                return None
            byte = self._buffer[at]
            length |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                break
        if len(self._buffer) < at + length:
            return None
        kind, body = self._buffer[0], self._buffer[at : at + length]
        self._buffer = self._buffer[at + length :]
        return kind, body

    def _await(self, kind: int) -> None:
        passed = b""
        while True:
            before = self._buffer
            packet = self._take()
            if packet is None:
                data = self.socket.recv(4096)
                self._buffer += data
                self.received_bytes += len(data)
            elif packet[0] == kind:
                break
            elif packet[0] & 0xF0 != _PUBLISH:
                raise ConnectionError(f"packet {packet[0]:#x} instead of {kind:#x}")
            else:  # brokers send what is retained before they answer a subscription
                passed += before[: len(before) - len(self._buffer)]
        self._buffer = passed + self._buffer

    def _id(self) -> bytes:
        self._next_id = self._next_id % 65_535 + 1
        return self._next_id.to_bytes(2, "big")


def connect_packet(client_id: str, account: tuple[str, str] | None = None) -> bytes:
    """CONNECT with a clean session and ten minutes of keep-alive; ``account``: user, password."""
    flags = 2 if account is None else 0xC2
    body = _text("MQTT") + bytes((4, flags)) + (600).to_bytes(2, "big") + _text(client_id)
    return _packet(0x10, body + b"".join(map(_text, account or ())))


def publish_packet(topic: str, payload: bytes) -> bytes:
    """PUBLISH at QoS 0: what whoever floods a broker would send."""
    return _packet(_PUBLISH, _text(topic) + payload)


def _text(text: str) -> bytes:
    return len(text).to_bytes(2, "big") + text.encode()


def _packet(kind: int, body: bytes) -> bytes:
    length, out = len(body), bytearray((kind,))
    while True:
        out.append(length & 127 | (128 if length > 127 else 0))
        length >>= 7
        if not length:
            return bytes(out) + body
