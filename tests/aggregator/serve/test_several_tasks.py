"""Several tasks, one fleet: through a real Mosquitto."""

from __future__ import annotations

from pathlib import Path

from device_sdk.wire.publish.receipts import UpdateIdentity, Verdict
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import command, invite, make_home, serving
from tests.fakes.tasks import add_task, task_text

ROUND = "quorum = 1\nwait_for_devices = 2\ndeadline_seconds = 20.0\nshare = 1.0"


def test_two_tasks_are_served_to_devices_that_know_one_each(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    add_task(home, "air", task_text(home, "air", ROUND))
    codes = invite(home, 2)
    with (
        serving(home) as served,
        ScriptedDevice(mosquitto.url, codes[0], 1) as anna,
        ScriptedDevice(mosquitto.url, codes[1], 2, task="air") as bert,
    ):
        for device in (anna, bert):
            device.enrol().join()
        for device, title in ((anna, "Title 3"), (bert, "air 3")):
            manifest = device.await_round(1)
            _, broadcast = device.fetch(manifest)
            assert broadcast.tensors["items"].shape == (20, 8)
            assert device.fetch_catalogue(manifest).titles[3] == title
            # Both are selected in both: each is heard of in its own task alone.
            assert device.send_and_wait(manifest, device.body()).verdict is Verdict.COUNTED
        made = {task.task.name: task for task in served.parts.tasks.served}
        assert [each.ingest.counted for each in made.values()] == [1, 1]
        # An update is counted where it says that it belongs, and nowhere else.
        manifest = anna.await_round(1)
        elsewhere = UpdateIdentity(
            anna.require_grant().device_id, "air", made["air"].rounds.generation, 1
        )
        receipt = anna.await_receipt(anna.send(elsewhere, anna.body()))
        assert receipt.verdict is Verdict.COUNTED
        unknown = UpdateIdentity(anna.require_grant().device_id, "none", 1, 1)
        receipt = anna.await_receipt(anna.send(unknown, anna.body()))
        assert (receipt.verdict, receipt.reason) == (Verdict.REFUSED, "wrong-task")
        # All devices of one task came: it goes on, and the other one waits for its own.
        assert bert.await_round(2).version == 1
        assert made["default"].rounds.current is not None
        assert made["default"].rounds.current.round == 1
        # A new group key with air's next round: what the first task published is readable yet.
        assert command(home, "rotate", "group") == 0
        receipts = [
            device.await_receipt(
                device.send(
                    UpdateIdentity(
                        device.require_grant().device_id, "air", made["air"].rounds.generation, 2
                    ),
                    device.body(),
                )
            )
            for device in (anna, bert)
        ]
        assert [each.verdict for each in receipts] == [Verdict.COUNTED] * 2
        bert.await_round(3)
        anna.open_session()
        assert len(anna.group_keys) == 2
        anna.fetch(anna.await_round(1))
        bert.open_session()
        bert.fetch(bert.await_round(3))
    with serving(home) as served:
        assert [task.aggregation.version for task in served.parts.tasks.served] == [0, 2]
        assert [task.rounds.arrived for task in served.parts.tasks.served] == [1, 0]
