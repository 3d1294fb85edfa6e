"""A broker that says exactly what a test wants, whatever it is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from tests.faults import packets


class ScriptedBroker:
    """Answers each CONNECT with ``connack`` (MQTT 5) and ``after``, and then does as a broker does.

    SUBSCRIBEs are answered with the reason codes of ``grants`` in turn, by filter; the last one
    goes on for ever, and a filter that is not named is granted. ``silent``: no publication is
    acknowledged. ``hangs_up_on``: a filter that ends the connection. ``forgets``: so many filters
    of each packet get no code.
    """

    def __init__(
        self,
        connack: bytes = b"\x20\x03\x00\x00\x00",
        after: bytes = b"",
        grants: dict[str, Sequence[int]] | None = None,
        silent: bool = False,
        hangs_up_on: str = "",
        forgets: int = 0,
    ) -> None:
        self._connack, self._after = connack, after
        self._grants = {name: list(codes) for name, codes in (grants or {}).items()}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.url = f"mqtt://127.0.0.1:{self._listener.getsockname()[1]}"
        self._silent, self._hangs_up_on, self._forgets = silent, hangs_up_on, forgets
        self.published: list[tuple[str, bytes]] = []
        """Topic and payload of each PUBLISH so far, of MQTT 5 without properties."""
        self.asked: list[str] = []
        """The filters of all SUBSCRIBEs so far."""
        self.packets: list[int] = []
        """How many filters each SUBSCRIBE had."""
        self._running = True
        self._cuts = 0
        self._threads = [threading.Thread(target=self._run, daemon=True)]

    def __enter__(self) -> ScriptedBroker:
        self._threads[0].start()
        return self

    def __exit__(self, *details: object) -> None:
        self._running = False
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def grant(self, topic_filter: str) -> None:
        """From now on."""
        self._grants[topic_filter] = [1]

    def cut(self) -> None:
        """End the connections of the moment."""
        self._cuts += 1

    def _run(self) -> None:
        while self._running:
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._serve, args=(peer, self._cuts), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, peer: socket.socket, cuts: int) -> None:
        with peer:
            peer.settimeout(0.02)
            try:
                self._converse(peer, cuts)
            except OSError:
                return

    def _converse(self, peer: socket.socket, cuts: int) -> None:
        incoming = packets.Packets()
        is_open = False
        while self._running and self._cuts == cuts:
            try:
                data = peer.recv(1 << 16)
            except TimeoutError:
                continue
            if not data:
                return
            for packet in incoming.feed(data):
                peer.sendall(self._answer(packet) if is_open else self._connack + self._after)
                is_open = True

    def _answer(self, packet: bytes) -> bytes:
        match packets.kind(packet):
            case packets.PUBLISH:
                body = _body(packet)
                at = 2 + int.from_bytes(body[:2], "big")
                number = body[at : at + 2] if packet[0] & 6 else b""
                self.published.append((body[2:at].decode(), body[at + len(number) + 1 :]))
                return b"\x40\x02" + number if number and not self._silent else b""
            case packets.SUBSCRIBE:
                body = _body(packet)
                at = 3 + body[2]  # packet id, length of the properties, properties
                names = []
                while at < len(body):
                    end = at + 2 + int.from_bytes(body[at : at + 2], "big")
                    names.append(body[at + 2 : end].decode())
                    at = end + 1  # behind the options
                self.asked += names
                self.packets.append(len(names))
                if self._hangs_up_on in names:
                    raise ConnectionAbortedError(self._hangs_up_on)
                codes = bytes(map(self._code, names[self._forgets :]))
                return bytes([0x90, 3 + len(codes)]) + body[:2] + b"\x00" + codes
            case packets.PINGREQ:
                return b"\xd0\x00"
        return b""

    def _code(self, topic_filter: str) -> int:
        codes = self._grants.get(topic_filter, [1])
        return codes.pop(0) if len(codes) > 1 else codes[0]


def _body(packet: bytes) -> bytes:
    at = 1
    while packet[at] & 128:
        at += 1
    return packet[at + 1 :]
