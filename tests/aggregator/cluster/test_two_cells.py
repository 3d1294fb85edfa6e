"""Two brokers with workers of their own: each device is heard at its cell, which it is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from aggregator.task.cluster import Cluster
from aggregator.task.file import read_task
from device_sdk.device import Device
from device_sdk.link.broker_url import parse_broker_url
from device_sdk.wire.seal.placement import shard_of
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK
from tests.fakes.array_device import local_data
from tests.fakes.brisk import BRISK
from tests.fakes.clusters import coordinated
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import invite
from tests.fakes.killed_rounds import DEVICES, await_version, make_home
from tests.fakes.waiting import PATIENCE_SECONDS
from tests.servers.fixtures import MakeDatabase

ROUNDS = 3


def fleet_home(folder: Path, url: str, store_url: str | None = None) -> AggregatorHome:
    linear_artifact(folder / "linear")
    settings = {"epochs": 2, "batch_size": 4}
    return make_home(folder, url, ROUNDS, method="fedavg", settings=settings, store_url=store_url)


def play(
    home: AggregatorHome, cluster: Cluster, entrances: Sequence[str]
) -> tuple[list[int], list[bytes]]:
    """Rounds of devices that enrol at these brokers in turn: what each worker counted, and who
    took part."""
    with coordinated(home, cluster) as running, ExitStack() as stack:
        for place, code in enumerate(invite(home, DEVICES)):
            folder = home.folder.parent / f"device-{place}"
            entrance = entrances[place % len(entrances)]
            Device.enrol(
                entrance, code, folder, link_settings=QUICK, timeout_seconds=PATIENCE_SECONDS
            ).close()
            device = Device.open(folder, pace=BRISK, link_settings=QUICK, data=local_data(place))
            stack.enter_context(device).start()
        await_version(home, ROUNDS)
        counted = [each.counted for each in running.runtime.statuses()]
        return counted, [row.device_id for row in running.parts.registry.devices()]


def test_each_device_is_served_at_its_cell(
    make_mosquitto: MakeMosquitto,
    make_database: MakeDatabase,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two brokers, a worker each, PostgreSQL: whichever broker a device enrols at, it goes to its
    own from then on."""
    urls = [make_mosquitto().url for _ in range(2)]
    home = fleet_home(tmp_path, urls[0], make_database())
    with home.task_file.open("a") as file:
        for url in urls:
            name = parse_broker_url(url).authority
            file.write(f'\n[[cluster.cells]]\nname = "{name}"\nworkers = 1\n')
    cluster = read_task(home.task_file).fleet.cluster
    with caplog.at_level(logging.INFO):
        counted, devices = play(home, cluster, urls)
    names = [each.name for each in cluster.cells]
    expected = [0, 0]
    for device_id in devices:
        expected[names.index(cluster.cell_of(shard_of(device_id)))] += ROUNDS
    assert counted == expected
    for url in urls:  # the worker's connection, and the coordinator's
        assert caplog.messages.count(f"connected to {url}") == 2
