"""More messages than anybody can work on: what stays quick, what is bounded, what is said."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aggregator.serve.broker_links import DEVICE_LIMIT, ENROLMENT_LIMIT, LossProbe
from benchmarks.aggregator.mqtt_client import MiniClient, connect_packet, publish_packet
from device_sdk.link.events import Connected, Event, EventQueue, Message, Outcome, Subscribed
from device_sdk.link.settings import LinkSettings
from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.receipts import Verdict
from device_sdk.wire.publish.topics import EnrolRequestTopic, UpTopic
from device_sdk.wire.seal.handshake import DeviceCredential, SessionOpening
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import MakeLink, await_event
from tests.brokers.mosquitto import RECOMMENDED, Mosquitto, password_file
from tests.brokers.scripted import ScriptedBroker
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import Serving, invite, make_home, serving
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.faults import packets

TEMPLATE = Path(__file__).parents[2] / "aggregator" / "acl.template"
USERS = {"tessera-aggregator": "server", "edge": "devices"}


class EmptiedWhileLookedAt(EventQueue):
    """Hands all it has to another thread just after the link has read that it is paused."""

    armed = False

    def __init__(self, like: EventQueue) -> None:
        self.__dict__.update(like.__dict__)
        self.taken: list[Event] = []

    @property
    def paused(self) -> bool:
        paused = super().paused
        if paused and self.armed:
            self.armed = False
            thread = threading.Thread(target=lambda: self.taken.extend(self.take(10_000, 0)))
            thread.start()
            thread.join()
        return paused


def test_a_queue_emptied_while_the_link_looks_at_it_is_noticed(
    mosquitto: Mosquitto, make_link: MakeLink
) -> None:
    hour = 3600  # of keep-alive: nothing else wakes the link
    small = LinkSettings(event_queue_messages=50, keepalive_seconds=hour, stall_seconds=hour)
    link = make_link(mosquitto.url, small, subscriptions=("up",), start=False)
    queue = EmptiedWhileLookedAt(link._loop.events)
    link._loop.events = queue
    link.start()
    await_event(link, Subscribed)
    sender = make_link(mosquitto.url)
    for number in range(60):
        sender.publish("up", b"%d" % number).wait(5)
    wait_until(lambda: queue.paused)
    time.sleep(0.1)  # the link sleeps, and does not read
    queue.armed = True
    link.publish("out", b"wakes the link, as every receipt does")
    wait_until(lambda: queue.taken)
    sender.publish("up", b"honest")
    while await_event(link, Message).payload != b"honest":
        pass


class EndlessBroker:
    """Accepts one client, and then sends it publications without ever stopping."""

    def __init__(self, topic: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = 0
        """Publications until now."""
        self.heard: list[tuple[int, bytes]] = []
        """Packets of the client's, and how many publications had been sent when they came."""
        self._packet = publish_packet(topic, bytes(2500))
        self._bytes = 0
        self._stopping = False
        self._threads = [threading.Thread(target=self._run)]

    def __enter__(self) -> EndlessBroker:
        self._threads[0].start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _run(self) -> None:
        peer, _ = self._listener.accept()
        with peer:
            peer.settimeout(0.2)
            peer.recv(4096)
            peer.sendall(b"\x20\x03\x00\x00\x00")
            listening = threading.Thread(target=self._listen, args=(peer,))
            listening.start()
            # In long calls: this thread shares the interpreter with the link's.
            flood = memoryview(self._packet * 2000)
            waiting, size = flood, len(self._packet)
            while not self._stopping:
                try:
                    sent = peer.send(waiting)
                except TimeoutError:
                    continue
                except OSError:
                    break
                self._bytes += sent
                self.sent = self._bytes // size
                waiting = waiting[sent:] or flood
            listening.join(10)

    def _listen(self, peer: socket.socket) -> None:
        incoming = packets.Packets()
        while not self._stopping:
            try:
                data = peer.recv(65_536)
            except TimeoutError:
                continue
            except OSError:
                return
            if not data:
                return
            self.heard += [(self.sent, bytes(packet)) for packet in incoming.feed(data)]


def test_what_we_send_leaves_though_the_broker_never_stops_sending(make_link: MakeLink) -> None:
    with EndlessBroker("up") as broker:
        link = make_link(broker.url, LinkSettings(event_queue_messages=1 << 20))
        await_event(link, Connected)
        began = time.monotonic()
        for number in range(20):
            before = broker.sent
            link.publish("out", b"receipt %d" % number, qos=0)
            while not any(b"receipt %d" % number in packet for _, packet in broker.heard):
                link.events(timeout_seconds=0.001)
                assert time.monotonic() - began < PATIENCE_SECONDS
            after = next(sent for sent, packet in broker.heard if b"receipt %d" % number in packet)
            # What lies in the two sockets' buffers, and a few reads of 64 KiB.
            assert after - before < 8000


def test_receipts_wait_for_no_acknowledgements(make_link: MakeLink) -> None:
    # MQTT 5, receive maximum 1; and no publication is ever acknowledged.
    with ScriptedBroker(connack=b"\x20\x06\x00\x00\x03\x21\x00\x01", silent=True) as broker:
        link = make_link(broker.url, LinkSettings())
        assert await_event(link, Connected).limits.receive_maximum == 1
        publications = [link.publish("chunk", b"", qos=1) for _ in range(3)]
        receipts = [link.publish("down", b"%d" % number, qos=0) for number in range(500)]
        assert {receipt.wait(PATIENCE_SECONDS) for receipt in receipts} == {Outcome.ACKNOWLEDGED}
        assert [each.outcome for each in publications] == [None] * 3
        wait_until(lambda: len(broker.published) == 501)
        assert [p for t, p in broker.published if t == "down"] == [b"%d" % n for n in range(500)]


@contextmanager
def guarded(
    make_mosquitto: MakeMosquitto, folder: Path, *lines: str
) -> Iterator[tuple[Mosquitto, Serving, ScriptedDevice, ScriptedDevice]]:
    """A broker with the rules that ship, an aggregator, an honest device and another enrolled."""
    passwords = password_file(folder / "passwords", USERS)
    broker = make_mosquitto(
        "allow_anonymous true", f"password_file {passwords}", f"acl_file {TEMPLATE}", *lines
    )
    address = broker.url.removeprefix("mqtt://")
    home = make_home(
        folder,
        f"mqtt://tessera-aggregator:server@{address}",
        "quorum = 1\nwait_for_devices = 2\ndeadline_seconds = 3600.0\nshare = 1.0",
    )
    url = f"mqtt://edge:devices@{address}"
    with serving(home) as served:
        codes = invite(home, 2)
        with ScriptedDevice(url, codes[0]) as honest, ScriptedDevice(url, codes[1]) as hostile:
            hostile.enrol()
            honest.enrol().join()
            yield broker, served, honest, hostile


@contextmanager
def flood(
    broker: Mosquitto, client_id: str, account: tuple[str, str] | None, topic: str, payload: bytes
) -> Iterator[Callable[[], int]]:
    """Publishes as fast as the broker takes it, some ten thousand a second; how many so far."""
    sent = 0
    stopping = threading.Event()
    link = socket.create_connection(("127.0.0.1", broker.port))
    link.sendall(connect_packet(client_id, account))
    assert link.recv(4) == b"\x20\x02\x00\x00"

    def run() -> None:
        nonlocal sent
        batch = publish_packet(topic, payload) * 100
        while not stopping.wait(0.01):
            link.sendall(batch)
            sent += 100

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: sent
    finally:
        stopping.set()
        thread.join(10)
        link.close()


def forged_open(device: ScriptedDevice) -> bytes:
    """Right in all but its admission tag."""
    real = device.credential()
    credential = DeviceCredential(real.device_id, real.identity, bytes(len(real.admission_key)))
    descriptor = device.require_descriptor()
    return SessionOpening(credential, descriptor, device.fresh(), time.monotonic).message


@pytest.mark.parametrize("lines", [(), RECOMMENDED], ids=["defaults", "recommended"])
def test_a_device_s_flood_meets_the_device_s_own_limit(
    make_mosquitto: MakeMosquitto, tmp_path: Path, lines: tuple[str, ...]
) -> None:
    with guarded(make_mosquitto, tmp_path, *lines) as (broker, served, honest, hostile):
        honest.await_round(1)
        counts = served.parts.refusals.counts
        handle = hostile.require_grant().handle
        topic = hostile.topics.write(UpTopic(0, handle))
        opening = forged_open(honest)
        began = time.monotonic()
        with flood(broker, handle.hex(), ("edge", "devices"), topic, opening) as sent:
            wait_until(lambda: sent() >= 8000)
            assert honest.take_part(1).verdict is Verdict.COUNTED
            wait_until(lambda: counts["too-many"] >= 1000)
            seconds = time.monotonic() - began
        # What got past the look at its topic, and so cost an HMAC.
        looked_at = counts["bad-admission"]
        assert looked_at <= DEVICE_LIMIT.burst + DEVICE_LIMIT.per_second * (seconds + 5)


def test_made_up_client_ids_share_one_limit(make_mosquitto: MakeMosquitto, tmp_path: Path) -> None:
    with guarded(make_mosquitto, tmp_path, *RECOMMENDED) as (broker, served, honest, _):
        honest.await_round(1)
        client = MiniClient(broker.port, "ab" * 16, ("edge", "devices"))
        topic = honest.topics.write(UpTopic(0, bytes.fromhex("ab" * 16)))
        packets_sent = 3000
        began = time.monotonic()
        client.socket.sendall(publish_packet(topic, bytes(600)) * packets_sent)
        counts = served.parts.refusals.counts
        wait_until(lambda: counts["too-many"] + counts["unknown-handle"] == packets_sent)
        seconds = time.monotonic() - began
        assert (
            counts["unknown-handle"] <= DEVICE_LIMIT.burst + DEVICE_LIMIT.per_second * seconds + 1
        )
        assert honest.take_part(1).verdict is Verdict.COUNTED
        client.socket.close()


@pytest.mark.parametrize("lines", [(), RECOMMENDED], ids=["defaults", "recommended"])
def test_a_stranger_s_flood_of_enrolments_delays_no_update(
    make_mosquitto: MakeMosquitto, tmp_path: Path, lines: tuple[str, ...]
) -> None:
    with guarded(make_mosquitto, tmp_path, *lines) as (broker, served, honest, _):
        honest.await_round(1)
        counts = served.parts.refusals.counts
        request = bytes((1, MessageType.ENROL_REQUEST)) + (1).to_bytes(8, "little") + bytes(1400)
        topic = honest.topics.write(EnrolRequestTopic())
        began = time.monotonic()
        with flood(broker, "stranger", None, topic, request) as sent:
            wait_until(lambda: sent() >= 8000)
            assert honest.take_part(1).verdict is Verdict.COUNTED
            wait_until(lambda: counts["too-many"] >= 1000)
            seconds = time.monotonic() - began
        looked_at = counts["unknown-token"]
        assert looked_at <= ENROLMENT_LIMIT.burst + ENROLMENT_LIMIT.per_second * (seconds + 5)


@pytest.mark.parametrize("settings", [(), RECOMMENDED], ids=["defaults", "recommended"])
def test_a_broker_that_drops_what_it_acknowledged_is_noticed(
    make_mosquitto: MakeMosquitto, make_link: MakeLink, settings: tuple[str, ...]
) -> None:
    broker = make_mosquitto("allow_anonymous true", *settings)
    small = LinkSettings(event_queue_messages=50)
    ours = make_link(broker.url, small, subscriptions=("up/#", "probe"))
    own = make_link(broker.url, LinkSettings())
    await_event(ours, Subscribed)
    await_event(ours, Subscribed)
    now = [0.0]
    probe = LossProbe(lambda payload: own.publish("probe", payload), bytes(16), lambda: now[0])

    def until_it_came() -> None:
        message = await_event(ours, Message)
        while message.topic != "probe":
            message = await_event(ours, Message)
        probe.came(message.payload)

    probe.turn(behind=False)
    until_it_came()
    # More than the sockets' buffers and a queue of 1,000 hold; nobody takes any of it.
    flooder = MiniClient(broker.port, "flood")
    for _ in range(100):
        flooder.socket.sendall(publish_packet("up/x", bytes(2500)) * 100)
    time.sleep(1.0)
    now[0] += 5
    probe.turn(behind=True)
    time.sleep(0.5)
    if settings:
        until_it_came()
    else:
        while any(isinstance(event, Message) for event in ours.events(timeout_seconds=1)):
            pass
    now[0] += 5
    probe.turn(behind=False)
    until_it_came()
    flooder.socket.close()
    assert probe.lost == (0 if settings else 1)


@pytest.mark.parametrize(("maximum", "said"), [(20, True), (1000, False)])
def test_a_small_receive_maximum_is_said_once(
    make_mosquitto: MakeMosquitto,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    maximum: int,
    said: bool,
) -> None:
    caplog.set_level(logging.INFO)
    broker = make_mosquitto("allow_anonymous true", f"max_inflight_messages {maximum}")
    with serving(make_home(tmp_path, broker.url)) as served:
        wait_until(lambda: caplog.text.count("connected to") == 1)
        broker.kill()
        wait_until(lambda: not served.parts.link.connected)
        broker.start()
        wait_until(lambda: caplog.text.count("connected to") == 2)
    assert caplog.text.count("max_inflight_messages 1000") == said
