from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from device_sdk.link.buffered_client import Admits, BufferedClient
from device_sdk.link.events import Message
from tests.fakes.waiting import PATIENCE_SECONDS

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
    """A client and the broker's end of its connection, by hand.

    ``quick``: publications are read and written as a link has it; else by paho, all of them.
    """

    def __init__(
        self, admits: Admits | None = None, *, quick: bool = False, five: bool = False
    ) -> None:
        self.got: list[bytes] = []
        self.heard: list[tuple[str, bytes, bool]] = []
        self.written: list[int] = []
        self.client = BufferedClient(
            CallbackAPIVersion.VERSION2,
            client_id="c",
            protocol=MQTTProtocolVersion.MQTTv5 if five else MQTTProtocolVersion.MQTTv311,
            dial=lambda: socket.create_connection(("127.0.0.1", port), 5),
            admits=admits,
            on_messages=self._heard if quick else None,
            on_written=self.written.extend,
        )
        self.client.on_message = lambda client, data, message: self._heard(
            [Message(message.topic, message.payload, message.retain)]
        )
        self.client.on_socket_register_write = lambda client, data, sock: None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            start: bool | Literal[3] = True if five else MQTT_CLEAN_START_FIRST_ONLY
            self.client.connect("127.0.0.1", port, clean_start=start)
            self.broker, _ = listener.accept()
        self.client.write()
        assert self.broker.recv(4096)[:1] == b"\x10"
        self.broker.sendall(b"\x20\x03\x00\x00\x00" if five else CONNACK)
        self.read()

    def _heard(self, messages: list[Message]) -> None:
        for message in messages:
            self.got.append(message.payload)
            self.heard.append((message.topic, message.payload, message.retained))

    def said(self) -> bytes:
        """All that the client has to say until now; the connection is of no use behind it."""
        self.client.write()
        sock = self.client.socket()
        if sock is not None:
            sock.shutdown(socket.SHUT_WR)
        self.broker.settimeout(PATIENCE_SECONDS)
        found = b""
        while received := self.broker.recv(1 << 16):
            found += received
        return found

    def read(self) -> None:
        sock = self.client.socket()
        sock.setblocking(True)
        sock.settimeout(PATIENCE_SECONDS)
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


@pytest.mark.parametrize("once", [False, True])
def test_what_a_slow_reader_leaves_waiting_arrives_in_order(pair: Pair, once: bool) -> None:
    count, size = 300, 20_000  # far more than the buffers of a socket hold
    publish = pair.client.publish_once if once else pair.client.publish
    for index in range(count):
        publish("t", index.to_bytes(2, "big") + bytes(size), 0)
    pair.client.write()
    assert pair.client.has_to_write
    assert not once or 0 < len(pair.written) < count, "those that the socket took"
    expected = b"".join(publication(index, size) for index in range(count))
    received = bytearray()
    pair.broker.settimeout(PATIENCE_SECONDS)
    while len(received) < len(expected):
        received += pair.broker.recv(1 << 20)
        pair.client.write()
    assert bytes(received) == expected
    assert not pair.client.has_to_write
    assert pair.written == [*range(65_536, 65_536 + count)] * once


def test_a_goodbye_follows_what_was_waiting(pair: Pair) -> None:
    pair.client.publish("t", b"\x00\x07", 0)
    pair.client.say_goodbye()
    pair.broker.settimeout(PATIENCE_SECONDS)
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
        pair.broker.settimeout(PATIENCE_SECONDS)
        while len(answers) < 4 * len(owed):
            answers += pair.broker.recv(4096)
        numbers = [answers[at + 2 : at + 4] for at in range(0, len(answers), 4)]
        assert sorted(int.from_bytes(number, "big") for number in numbers) == owed
        assert all(answers[at : at + 2] == b"\x40\x02" for at in range(0, len(answers), 4))
    finally:
        pair.close()


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("five", [False, True])
def test_a_limit_holds_for_publications_however_short(quick: bool, five: bool) -> None:
    """At QoS 0 nothing stands between a topic and a payload of no bytes, or of one."""
    left = 4

    def admits(topic: bytes) -> bool:
        nonlocal left
        left -= topic == b"t"
        return topic == b"u" or left >= 0

    pair = Pair(admits, quick=quick, five=five)
    try:
        payloads = [b"", b"a", b"bc", b""] * 50
        stream = b""
        for payload in payloads:
            body = b"\x00\x01t" + bytes(five) + payload
            stream += b"\x30" + bytes((len(body),)) + body
        pair.broker.sendall(stream + b"\x30\x05\x00\x01u" + (b"\x00." if five else b".."))
        while not pair.got or pair.got[-1][-1:] != b".":
            pair.read()
        assert pair.got[:-1] == payloads[:4]
        assert left == 4 - len(payloads)
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


TOPICS = (b"t", b"a/b", "\u00fc".encode(), b"", b"\xff")
TWO_PROPERTIES = b"\x04\x01\x01\x01\x00"


@st.composite
def packets(draw: st.DrawFn) -> tuple[list[bytes], bool]:
    """What a broker may send, good and bad; and whether it is of MQTT 5."""
    five = draw(st.booleans())
    made = []
    for number in range(1, draw(st.integers(1, 12)) + 1):
        kind = draw(st.sampled_from(["publish"] * 6 + ["pingresp", "puback", "cut"]))
        if kind == "pingresp":
            made.append(b"\xd0\x00")
            continue
        if kind == "puback":
            made.append(b"\x40\x02" + number.to_bytes(2, "big"))
            continue
        topic = draw(st.sampled_from(TOPICS[:3] * 8 + TOPICS))
        qos, flags = draw(st.sampled_from([0, 2])), draw(st.sampled_from([0, 1, 8]))
        body = len(topic).to_bytes(2, "big") + topic
        body += number.to_bytes(2, "big") if qos else b""
        if five:
            body += draw(st.sampled_from([b"\x00", b"\x00", b"\x02\x01\x01", TWO_PROPERTIES]))
        body += bytes(draw(st.integers(0, 90)))
        if kind == "cut":
            body = body[: draw(st.integers(0, 4))]
        made.append(bytes((0x30 | qos | flags, len(body))) + body)
    return made, five


@settings(max_examples=80, deadline=None)
@example(([b"2\x08\x00\x01t\x00\x01\x02\x01\x01", b"2\x06\x00\x01t\x00\n\x00"], True), [])
@given(packets(), st.lists(st.integers(1, 60), max_size=6))
def test_publications_are_read_as_paho_reads_them(
    given_packets: tuple[list[bytes], bool], cuts: list[int]
) -> None:
    made, five = given_packets
    outcomes = []
    for quick in (False, True):
        pair, rest = Pair(quick=quick, five=five), b"".join(made)
        wrong = False
        try:
            for cut in [*cuts, len(rest)]:
                piece, rest = rest[:cut], rest[cut:]
                if piece and pair.client.socket() is not None and not wrong:
                    pair.broker.sendall(piece)
                    try:
                        pair.read()
                    except Exception:
                        wrong = True  # a link ends the connection then
            ended = wrong or pair.client.socket() is None
            # A connection that ends owes the broker nothing.
            outcomes.append((pair.heard, ended, b"" if ended else pair.said()))
        finally:
            pair.close()
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("five", [False, True])
def test_what_is_published_once_is_what_paho_would_write(five: bool) -> None:
    messages = [
        ("t", b"", False),
        ("a/\u00fc", bytes(200), True),
        ("t" * 300, bytes(70_000), False),
    ]
    quick, slow = Pair(quick=True, five=five), Pair(five=five)
    try:
        numbers = [quick.client.publish_once(*message) for message in messages]
        assert numbers == [65_536, 65_537, 65_538]
        for topic, payload, retain in messages:
            slow.client.publish(topic, payload, 0, retain)
        assert quick.client.has_to_write
        assert quick.said() == slow.said()
        assert quick.written == numbers
    finally:
        quick.close()
        slow.close()
