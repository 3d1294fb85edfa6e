"""A process that sends garbage at a given rate: ``python -m benchmarks.aggregator.flood ...``."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from benchmarks.aggregator.mqtt_client import MiniClient, connect_packet, publish_packet
from device_sdk.wire.freshness import INCARNATION_BYTES
from device_sdk.wire.record import Record
from device_sdk.wire.topics import PresenceTopic, Topics

__all__ = ["main"]

_BATCH_SECONDS = 0.01
_PATIENCE_SECONDS = 10.0
_KINDS = ("garbage", "opens")


def main() -> int:
    """Arguments: port, kind, messages a second, file with one topic a line, file for the count."""
    port, kind, rate = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    topics = Path(sys.argv[4]).read_text().split()
    count_file = Path(sys.argv[5])
    if kind not in _KINDS:
        raise ValueError(f"{kind!r} is no kind of flood; expected one of {', '.join(_KINDS)}")
    link = socket.create_connection(("127.0.0.1", port))
    link.sendall(connect_packet("flood"))
    life = _shown_incarnation(port) if kind == "opens" else b""
    packets = [publish_packet(topic, _payload(kind, life)) for topic in topics]
    sent, began = 0, time.perf_counter()
    next_note = began
    while True:
        now = time.perf_counter()
        due = int((now - began) * rate) - sent
        if due > 0:
            link.sendall(b"".join(packets[(sent + n) % len(packets)] for n in range(due)))
            sent += due
        if now >= next_note:
            next_note = now + 0.1
            count_file.write_text(str(sent))
        time.sleep(_BATCH_SECONDS)


def _payload(kind: str, life: bytes) -> bytes:
    if kind == "garbage":
        return b"\x01\x10" + bytes(2) + os.urandom(596)  # looks like an envelope
    # A session open of the right form and length, for this life of the aggregator (else it is
    # refused before the tag), under an admission key that nobody has.
    fresh = life + (2**40).to_bytes(8, "little")
    return b"\x01\x05" + (1).to_bytes(8, "little") + fresh + os.urandom(16 + 2500)


def _shown_incarnation(port: int) -> bytes:
    """What anybody can read at the broker."""
    client, topic = MiniClient(port, "flood-ear"), Topics().write(PresenceTopic())
    client.subscribe(topic)
    until = time.perf_counter() + _PATIENCE_SECONDS
    while time.perf_counter() < until:
        for at, payload in client.received():
            if at == topic:
                client.socket.close()
                body = Record.decode(payload[66:], ("incarnation", "started"), limit_bytes=256)
                return body.octets("incarnation", INCARNATION_BYTES)
        time.sleep(_BATCH_SECONDS)
    raise TimeoutError("no aggregator has shown itself at this broker")


if __name__ == "__main__":
    sys.exit(main())
