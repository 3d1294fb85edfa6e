"""What a connection costs the broker, and what a download costs by either way."""

from __future__ import annotations

import hashlib
import http.client
import http.server
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.aggregator.broker import running_mosquitto
from benchmarks.aggregator.mqtt_client import MiniClient
from benchmarks.cluster.processes import Meter, between
from device_sdk.wire.publish.topics import ChunkTopic, DownTopic, Topics

_SETTLE_SECONDS = 0.5


@dataclass(frozen=True)
class ConnectionFigures:
    """Of a Mosquitto without TLS, for each connection that has one subscription, idle.

    Attributes:
        connections: how many were open at once.
        broker_bytes: of the broker's memory.
        connect_micros: of the broker's processor time.
        download_micros: of the broker's processor time, for a download of ``chunk_bytes``.
        broker_download_bytes: on the wire for it, above TCP.
        http_download_bytes: the same, request and answer's head with it, from a web server.
    """

    connections: int
    broker_bytes: float
    connect_micros: float
    chunk_bytes: int
    download_micros: float
    broker_download_bytes: float
    http_download_bytes: float


def measure_connections(
    connections: int, chunks: int, chunk_bytes: int, downloads: int
) -> ConnectionFigures:
    """Connections that stay, and ``downloads`` of ``chunks`` of ``chunk_bytes`` each."""
    rng = np.random.default_rng(5)
    topics = Topics()
    content = rng.bytes(32)
    messages = [rng.bytes(chunk_bytes) for _ in range(chunks)]
    with tempfile.TemporaryDirectory() as name, running_mosquitto(Path(name)) as broker:
        meter = Meter(broker.pid, broker.pid)
        publisher = MiniClient(broker.port, "publisher")
        for place, message in enumerate(messages):
            publisher.retain(topics.write(ChunkTopic(content, place)), message)
        time.sleep(_SETTLE_SECONDS)
        before = meter.read(memory=True)
        clients = []
        for number in range(connections):
            client = MiniClient(broker.port, f"c-{number}")
            client.subscribe(topics.write(DownTopic(rng.bytes(16))))
            clients.append(client)
        after = meter.read(memory=True)
        used = between(before, after)
        held = after[broker.pid][3] - before[broker.pid][3]
        received = 0
        for client in clients[:downloads]:
            client.subscribe(topics.chunk_filter(content))
            got = 0
            while got < chunks:
                got += sum(1 for _ in client.received())
            received += client.received_bytes
        downloading = between(after, meter.read())
        for client in clients:
            client.socket.close()
    return ConnectionFigures(
        connections,
        held * 1e6 / connections,
        used.seconds["broker"] * 1e6 / connections,
        chunks * chunk_bytes,
        downloading.seconds["broker"] * 1e6 / downloads,
        received / downloads,
        _http_bytes(messages),
    )


def _http_bytes(messages: list[bytes]) -> float:
    with tempfile.TemporaryDirectory() as name, _web_server(Path(name)) as port:
        total = 0
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for message in messages:
            digest = hashlib.sha256(message).hexdigest()
            (Path(name) / digest).write_bytes(message)
            connection.request("GET", f"/{digest}")
            answer = connection.getresponse()
            assert answer.read() == message
            head = sum(len(f"{key}: {value}\r\n") for key, value in answer.getheaders())
            asked = len(f"GET /{digest} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n")
            total += len(message) + head + asked + len("HTTP/1.1 200 OK\r\n\r\n\r\n")
        connection.close()
        return float(total)


@contextmanager
def _web_server(folder: Path) -> Iterator[int]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *parts: object) -> None:
            super().__init__(*parts, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *parts: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
