from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from device_sdk.link.buffered_client import Admits, BufferedClient

CONNACK = b"\x20\x02\x00\x00"


def publication(index: int, size: int, topic: bytes = b"t", packet_id: int = 0) -> bytes:
    body = len(topic).to_bytes(2, "big") + topic
    body += packet_id.to_bytes(2, "big") if packet_id else b""
    body += index.to_bytes(2, "big") + bytes(size)
    length = bytearray()
    rest = len(body)
    while rest > 127:
        length.append(rest & 127 | 128)
        rest >>= 7
    return (b"\x32" if packet_id else b"\x30") + bytes(length) + bytes((rest,)) + body


class Pair:
    """A client on 3.1.1 and the broker's end of its connection, by hand."""

    def __init__(self, admits: Admits | None = None) -> None:
        self.got: list[bytes] = []
        self.client = BufferedClient(
            CallbackAPIVersion.VERSION2,
            client_id="c",
            protocol=MQTTProtocolVersion.MQTTv311,
            dial=lambda: socket.create_connection(("127.0.0.1", port), 5),
            admits=admits,
        )
        self.client.on_message = lambda client, data, message: self.got.append(message.payload)
        self.client.on_socket_register_write = lambda client, data, sock: None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self.client.connect("127.0.0.1", port, clean_start=MQTT_CLEAN_START_FIRST_ONLY)
            self.broker, _ = listener.accept()
        self.client.write()
        assert self.broker.recv(4096)[:1] == b"\x10"
        self.broker.sendall(CONNACK)
        self.read()

    def read(self) -> None:
        sock = self.client.socket()
        assert sock is not None
        sock.setblocking(True)
        sock.settimeout(5)
        sock.recv(1, socket.MSG_PEEK)  # wait until something is there
        sock.setblocking(False)
        self.client.read()

    def close(self) -> None:
        sock = self.client.socket()
        if sock is not None:
            sock.close()
        self.broker.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_one_read_handles_all_that_came(pair: Pair) -> None:
    pair.broker.sendall(b"".join(publication(index, 40) for index in range(50)))
    pair.read()
    assert [payload[:2] for payload in pair.got] == [bytes((0, index)) for index in range(50)]
    assert not pair.client.has_read_ahead


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=12),
    st.lists(st.integers(1, 200), max_size=8),
)
def test_packets_that_come_in_pieces_are_whole(sizes: list[int], cuts: list[int]) -> None:
    pair = Pair()
    try:
        stream = b"".join(publication(index, size) for index, size in enumerate(sizes))
        for cut in [*cuts, len(stream)]:
            piece, stream = stream[:cut], stream[cut:]
            if piece:
                pair.broker.sendall(piece)
                pair.read()
        assert [len(payload) - 2 for payload in pair.got] == sizes
        assert [int.from_bytes(payload[:2], "big") for payload in pair.got] == [*range(len(sizes))]
    finally:
        pair.close()


def test_what_a_slow_reader_leaves_waiting_arrives_in_order(pair: Pair) -> None:
    count, size = 300, 20_000  # far more than the buffers of a socket hold
    for index in range(count):
        pair.client.publish("t", index.to_bytes(2, "big") + bytes(size), 0)
    pair.client.write()
    assert pair.client.has_to_write
    expected = b"".join(publication(index, size) for index in range(count))
    received = bytearray()
    pair.broker.settimeout(5)
    while len(received) < len(expected):
        received += pair.broker.recv(1 << 20)
        pair.client.write()
    assert bytes(received) == expected
    assert not pair.client.has_to_write


def test_a_goodbye_follows_what_was_waiting(pair: Pair) -> None:
    pair.client.publish("t", b"\x00\x07", 0)
    pair.client.say_goodbye()
    pair.broker.settimeout(5)
    assert pair.broker.recv(4096) == publication(7, 0) + b"\xe0\x00"
    assert pair.client.socket() is None


def test_a_read_has_an_end_though_the_broker_never_stops(pair: Pair) -> None:
    flood = b"".join(publication(index, 2500) for index in range(200))
    stopping = threading.Event()

    def send() -> None:
        pair.broker.settimeout(0.2)
        while not stopping.is_set():
            try:
                pair.broker.sendall(flood[7:] + flood[:7])  # never ends with a packet
            except TimeoutError:
                continue

    pair.broker.sendall(flood[:7])
    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(50):
            before = len(pair.got)
            pair.read()
            assert len(pair.got) - before <= 65_536 // 2500 + 1
    finally:
        stopping.set()
        sender.join()


def test_small_packets_are_handled_by_the_hundred(pair: Pair) -> None:
    pair.broker.sendall(b"".join(publication(index, 0) for index in range(1000)))
    sizes = []
    while sum(sizes) < 1000:
        before = len(pair.got)
        pair.client.read() if pair.client.has_read_ahead else pair.read()
        sizes.append(len(pair.got) - before)
    assert max(sizes) == 256
    assert [int.from_bytes(payload, "big") for payload in pair.got] == [*range(1000)]
    assert not pair.client.has_read_ahead


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 400)), max_size=12),
    st.lists(st.integers(1, 300), max_size=8),
)
def test_what_is_not_admitted_is_acknowledged_and_never_seen(
    messages: list[tuple[bool, bool, int]], cuts: list[int]
) -> None:
    asked: list[bytes] = []

    def admits(topic: bytes) -> bool:
        asked.append(topic)
        return topic == b"t"

    pair = Pair(admits)
    try:
        stream = b""
        for index, (wanted, acknowledged, size) in enumerate(messages):
            topic = b"t" if wanted else b"u"
            stream += publication(index, size, topic, index + 1 if acknowledged else 0)
        for cut in [*cuts, len(stream)]:
            piece, stream = stream[:cut], stream[cut:]
            if piece:
                pair.broker.sendall(piece)
                pair.read()
        expected = [index for index, (wanted, _, _) in enumerate(messages) if wanted]
        assert [int.from_bytes(payload[:2], "big") for payload in pair.got] == expected
        assert asked == [b"t" if wanted else b"u" for wanted, _, _ in messages]
        pair.client.write()
        answers = b""
        owed = [index + 1 for index, (_, acknowledged, _) in enumerate(messages) if acknowledged]
        pair.broker.settimeout(5)
        while len(answers) < 4 * len(owed):
            answers += pair.broker.recv(4096)
        numbers = [answers[at + 2 : at + 4] for at in range(0, len(answers), 4)]
        assert sorted(int.from_bytes(number, "big") for number in numbers) == owed
        assert all(answers[at : at + 2] == b"\x40\x02" for at in range(0, len(answers), 4))
    finally:
        pair.close()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_end_a_connection_or_wait_and_nothing_else(stream: bytes) -> None:
    pair = Pair(lambda topic: len(topic) % 2 == 0)
    try:
        pair.broker.sendall(stream)
        pair.broker.shutdown(socket.SHUT_WR)
        for _ in range(20):
            if pair.client.socket() is None:
                break
            pair.client.read()
        assert pair.client.socket() is None
    finally:
        pair.close()
