"""Coordinator and workers over one broker and one store: rounds complete, whoever takes what in."""

from __future__ import annotations

from pathlib import Path

from aggregator.task.cluster import Cell, Cluster
from device_sdk.wire.publish.receipts import Verdict
from device_sdk.wire.seal.placement import shard_of
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.clusters import coordinated
from tests.fakes.homes import invite, make_home

DEVICES = 6
ROUND = (
    f"quorum = {DEVICES}\nwait_for_devices = {DEVICES}\ndeadline_seconds = 120.0\nmost_rounds = 3"
)


def test_two_workers_share_a_fleet(
    mosquitto: Mosquitto, tmp_path: Path, store_url: str | None
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND, store_url=store_url)
    cluster = Cluster((Cell("", None, 2),))
    with coordinated(home, cluster) as running:
        devices = [
            ScriptedDevice(mosquitto.url, code, seed)
            for seed, code in enumerate(invite(home, DEVICES))
        ]
        for each in devices:
            each.enrol().join()
        for number in range(1, 4):
            manifests = [each.await_round(number) for each in devices]
            for each, manifest in zip(devices, manifests, strict=True):
                receipt = each.send_and_wait(manifest, each.body())
                assert receipt.verdict is Verdict.COUNTED
        served = [each.counted for each in running.runtime.statuses()]
        for each in devices:
            each.await_round(4)
            each.disconnect()
    second = sum(shard_of(each.require_grant().device_id) % 2 for each in devices)
    assert served == [3 * (DEVICES - second), 3 * second]
    store = home.open_store()
    rounds = [row for row in store.first.rounds.latest(50) if not row.unfinished]
    assert sorted((row.round, row.participants, row.next_version) for row in rounds) == [
        (number, DEVICES, number) for number in range(1, 4)
    ]
    store.database.close()
