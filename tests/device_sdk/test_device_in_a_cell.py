"""A device whose grant, or a later placement, names a cell: real brokers and connections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from device_sdk import Device
from device_sdk.link.broker_url import BrokerWay, parse_broker_url
from device_sdk.link.events import Connected, Disconnected
from device_sdk.link.link import Link
from device_sdk.wire.seal.placement import Placement, shard_of
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK, MakeLink, await_event
from tests.brokers.mosquitto import Mosquitto
from tests.brokers.proxy import Proxy
from tests.fakes.brisk import BRISK
from tests.fakes.homes import Serving, invite, make_home, serving
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

ROUNDS = "quorum = 1\nwait_for_devices = 1\npause_seconds = 0.1"
PACE = replace(BRISK, cell_seconds=1.0, renew_seconds=0.1)


@contextmanager
def cells(mosquitto: Mosquitto) -> Iterator[tuple[Proxy, Proxy]]:
    """Two ways to the broker, each a cell of its own."""
    north, south = Proxy(mosquitto.port), Proxy(mosquitto.port)
    try:
        yield north, south
    finally:
        north.stop()
        south.stop()


def name_of(proxy: Proxy) -> str:
    return f"localhost:{proxy.port}"


def await_rounds(served: Serving, more: int = 2) -> None:
    ingest = served.parts.first.ingest
    wanted = ingest.counted + more
    wait_until(lambda: ingest.counted >= wanted)


def stored_cell(device: Device) -> str:
    membership = device._world.home.membership.load()
    return membership.grant.cell


def test_a_device_lives_in_the_cell_that_it_is_told_and_survives_its_end(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUNDS)
    (code,) = invite(home)
    with cells(mosquitto) as (north, south):
        told = {"cell": name_of(north)}

        def placement_of(device_id: bytes) -> Placement:
            return Placement(shard_of(device_id), told["cell"])

        with (
            serving(home, placement_of=placement_of) as served,
            Device.enrol(
                mosquitto.url,
                code,
                tmp_path / "dev",
                pace=PACE,
                link_settings=QUICK,
                timeout_seconds=PATIENCE_SECONDS,
            ) as device,
        ):
            for item in range(5):
                device.record(f"item-{item}")
            assert stored_cell(device) == name_of(north) and north.accepted == 0
            device.start()
            await_rounds(served)
            assert north.accepted >= 1, "it went there, and never to the broker it enrolled at"
            # The cell is split: told with the next session, which the aggregator's loss brings.
            told["cell"] = name_of(south)
            served.parts.table.end(bytes.fromhex(device.device_id))
            wait_until(lambda: stored_cell(device) == name_of(south))
            wait_until(lambda: south.accepted >= 1)
            await_rounds(served)
            # The cell ends, and nobody tells of another.
            told["cell"] = ""
            south.stop()
            wait_until(lambda: stored_cell(device) == "")
            await_rounds(served)
            # What it was told holds for a thread that starts anew, too.
            told["cell"] = name_of(north)
            served.parts.table.end(bytes.fromhex(device.device_id))
            wait_until(lambda: stored_cell(device) == name_of(north))
            device.stop()
            before = north.accepted
            device.start()
            wait_until(lambda: north.accepted > before)


def test_a_link_is_redirected_at_once_and_keeps_its_subscriptions(
    make_mosquitto: MakeMosquitto, make_link: MakeLink
) -> None:
    first, second = make_mosquitto(), make_mosquitto()
    with closing_link(first.url) as link:
        link.subscribe("t")
        link.start()
        await_event(link, Connected)
        link.redirect(BrokerWay.parse(second.url))
        assert await_event(link, Disconnected).reason == "moved"
        await_event(link, Connected)
        other = make_link(second.url)
        wait_until(lambda: other.publish("t", b"hello").wait(1.0) and heard(link))


def heard(link: Link) -> bool:
    return any(getattr(event, "payload", b"") == b"hello" for event in link.events(most=1))


@contextmanager
def closing_link(url: str) -> Iterator[Link]:
    link = Link(url, rng=np.random.default_rng(1), clock=time.monotonic, settings=QUICK)
    try:
        yield link
    finally:
        link.stop()


def test_only_host_and_port_of_the_way_change() -> None:
    enrolled = parse_broker_url("wss://user:secret@front.example:444/a/mqtt?token=x")
    moved = enrolled.at("north.example", None)
    assert moved == replace(enrolled, host="north.example")
    assert str(enrolled.at("north.example", 8883)) == "wss://north.example:8883/a/mqtt"
