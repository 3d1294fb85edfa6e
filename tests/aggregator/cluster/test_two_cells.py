"""Two brokers with workers of their own: each device is heard at its cell, which it is told."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from aggregator.task.cluster import Cell, Cluster
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


def test_each_device_is_served_at_its_cell(make_mosquitto: MakeMosquitto, tmp_path: Path) -> None:
    brokers = [make_mosquitto(), make_mosquitto()]
    urls = [parse_broker_url(each.url) for each in brokers]
    cells = tuple(Cell(f"127.0.0.1:{url.port}", url, 1) for url in urls)
    cluster = Cluster(cells)
    linear_artifact(tmp_path / "linear")
    home = make_home(
        tmp_path, brokers[0].url, 3, method="fedavg", settings={"epochs": 2, "batch_size": 4}
    )
    with coordinated(home, cluster) as running, ExitStack() as stack:
        devices = []
        for place, code in enumerate(invite(home, DEVICES)):
            folder = tmp_path / f"device-{place}"
            # Whichever broker a device enrols at, it goes to its own from then on.
            entrance = brokers[place % 2].url
            Device.enrol(entrance, code, folder, link_settings=QUICK).close()
            device = Device.open(folder, pace=BRISK, link_settings=QUICK, data=local_data(place))
            devices.append(stack.enter_context(device))
            device.start()
        await_version(home, 3)
        served = [each.counted for each in running.runtime.statuses()]
        expected, names = [0, 0], [each.name for each in cells]
        for row in running.parts.registry.devices():
            expected[names.index(cluster.cell_of(shard_of(row.device_id)))] += 3
        assert served == expected
