"""A broker of several nodes is a cell: three NATS servers, two workers, a device at each node."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from aggregator.task.cluster import Cell, Cluster
from device_sdk.device import Device
from tests.brokers.links import QUICK
from tests.brokers.nats_cluster import NatsCluster
from tests.fakes.array_device import local_data
from tests.fakes.brisk import BRISK
from tests.fakes.clusters import Processes, coordinated
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import invite
from tests.fakes.killed_rounds import DEVICES, await_version, make_home
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

ROUNDS = 5
TWO = Cluster((Cell("", None, 2),))


def participants(home: AggregatorHome) -> dict[int, int | None]:
    """By round; without the one in which the task rests."""
    store = home.open_store()
    found = {row.round: row.participants for row in store.first.rounds.latest(50) if row.threshold}
    store.database.close()
    return found


@pytest.mark.slow
def test_rounds_go_on_though_a_worker_and_a_node_are_killed(
    nats_cluster: NatsCluster, tmp_path: Path
) -> None:
    """The aggregator is at one node. Each device is counted in each round, once, and knows it."""
    linear_artifact(tmp_path / "linear")
    settings = {"epochs": 1, "batch_size": 4}
    urls = nats_cluster.urls
    home = make_home(tmp_path, urls[0], ROUNDS, method="fedavg", settings=settings)
    with coordinated(home, TWO, processes=True) as running, ExitStack() as stack:
        devices = []
        for place, code in enumerate(invite(home, DEVICES)):
            folder = tmp_path / f"device-{place}"
            Device.enrol(
                urls[place], code, folder, link_settings=QUICK, timeout_seconds=PATIENCE_SECONDS
            ).close()
            device = Device.open(folder, pace=BRISK, link_settings=QUICK, data=local_data(place))
            devices.append(stack.enter_context(device))
            device.start()
        await_version(home, 1)
        assert isinstance(running.runtime, Processes)
        running.runtime.workers[0].signal(signal.SIGKILL)
        await_version(home, 2)
        nats_cluster.kill_node(2)
        nats_cluster.start_node(2)
        await_version(home, ROUNDS)
        wait_until(lambda: not any(each.status().outbox for each in devices), "no receipt")
    assert participants(home) == dict.fromkeys(range(1, ROUNDS + 1), DEVICES)
