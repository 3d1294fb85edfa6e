"""Coordinator and workers over one broker and one store: rounds complete, whoever takes what in."""

from __future__ import annotations

from pathlib import Path

from aggregator.keys.registry import revoke
from aggregator.task.cluster import Cell, Cluster
from device_sdk.wire.publish.receipts import RecordType, Verdict, leave_digest
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.clusters import Threads, coordinated
from tests.fakes.homes import invite, make_home
from tests.fakes.waiting import wait_until


def test_who_leaves_or_is_revoked_is_heard_by_no_worker(
    mosquitto: Mosquitto, tmp_path: Path, store_url: str | None
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 9", store_url=store_url)
    with coordinated(home, Cluster((Cell("", None, 2),))) as running:
        assert isinstance(running.runtime, Threads)
        devices = [
            ScriptedDevice(mosquitto.url, code, seed).enrol().join()
            for seed, code in enumerate(invite(home, 3))
        ]

        def sessions() -> int:
            return sum(each.sessions for each in running.runtime.statuses())

        assert sessions() == 3
        gone = devices[0].require_grant().device_id
        store = home.open_store()
        with store.database.transaction():
            assert revoke(store, gone, 1)
        store.database.close()
        wait_until(lambda: sessions() == 2, sessions)
        wait_until(lambda: len(running.parts.registry) == 2, lambda: len(running.parts.registry))
        devices[1].publish_up(devices[1].sessions.seal(RecordType.LEAVE, b""))
        digest = leave_digest(devices[1].require_grant().device_id)
        assert devices[1].await_receipt(digest).verdict is Verdict.NOTED
        wait_until(lambda: sessions() == 1, sessions)
        wait_until(lambda: len(running.parts.registry) == 1, lambda: len(running.parts.registry))
        for each in devices:
            each.disconnect()
