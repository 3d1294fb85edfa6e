"""More messages than anybody can work on: what stays quick, what is bounded, what is said."""

from __future__ import annotations

import socket
import threading
import time

from benchmarks.aggregator.mqtt_client import publish_packet
from device_sdk.wire.event_queue import EventQueue
from device_sdk.wire.link_events import Connected, Event, Message, Subscribed
from device_sdk.wire.link_settings import LinkSettings
from tests.brokers.links import MakeLink, await_event
from tests.brokers.mosquitto import Mosquitto
from tests.faults import packets


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
    small = LinkSettings(event_queue_messages=50)  # and thirty seconds of keep-alive
    link = make_link(mosquitto.url, small, subscriptions=("up",), start=False)
    queue = EmptiedWhileLookedAt(link._loop.events)
    link._loop.events = queue
    link.start()
    await_event(link, Subscribed)
    sender = make_link(mosquitto.url)
    for number in range(60):
        sender.publish("up", b"%d" % number).wait(5)
    until = time.monotonic() + 5
    while not queue.paused and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)  # the link sleeps, and does not read
    queue.armed = True
    link.publish("out", b"wakes the link, as every receipt does")
    while not queue.taken and time.monotonic() < until:
        time.sleep(0.01)
    sender.publish("up", b"honest")
    began = time.monotonic()
    while await_event(link, Message, 10).payload != b"honest":
        pass
    assert time.monotonic() - began < 2


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
                assert time.monotonic() - began < 60
            after = next(sent for sent, packet in broker.heard if b"receipt %d" % number in packet)
            # What lies in the two sockets' buffers, and a few reads of 64 KiB.
            assert after - before < 8000
