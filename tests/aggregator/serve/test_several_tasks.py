"""Several tasks, one fleet: through a real Mosquitto."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from aggregator.serve.service import Parts
from device_sdk.device import Device
from device_sdk.wire.publish.receipts import UpdateIdentity, Verdict
from device_sdk.wire.publish.task_messages import Standing
from device_sdk.world import TrainingOptions
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.brisk import BRISK
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import command, invite, make_home, serving
from tests.fakes.outputs import error_of, output_of
from tests.fakes.parts import enrol
from tests.fakes.tasks import add_task, task_text
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

ROUND = "quorum = 1\nwait_for_devices = 2\nshare = 1.0"


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


def test_a_task_is_for_the_devices_with_its_labels(mosquitto: Mosquitto, tmp_path: Path) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    alone = ROUND.replace("wait_for_devices = 2", "wait_for_devices = 1")
    north = task_text(home, "air", alone, more='only = {site = ["north", "east"]}')
    codes = invite(home, 2)
    with (
        serving(home) as served,
        ScriptedDevice(mosquitto.url, codes[0], 1) as anna,
        ScriptedDevice(mosquitto.url, codes[1], 2, task="air") as bert,
    ):
        for device in (anna, bert):
            device.enrol().join()
        anna.await_round(1)
        assert anna.standing is None, "no task chooses: nothing is said"
        add_task(home, "air", north)
        # Nobody has such labels yet, and both are told.
        anna.wait_for(lambda: anna.standing is not None)
        assert anna.standing == Standing({}, (("default", "all"),))
        air = served.parts.tasks.served[1]
        assert air.rounds.eligible == 0 and air.rounds.current is None
        label(home, anna, {"site": "north"})
        anna.wait_for(lambda: anna.standing is not None and len(anna.standing.tasks) == 2)
        assert anna.standing == Standing({"site": "north"}, (("air", "all"), ("default", "all")))
        manifest = bert.await_round(1)
        row = air.rounds.current
        assert row is not None and (row.expected, row.round) == (1, 1)
        receipt = bert.send_and_wait(manifest, bert.body())
        assert (receipt.verdict, receipt.reason) == (Verdict.REFUSED, "not-eligible")
        # Who loses the label is not waited for: a round that has nobody left ends.
        label(home, bert, {"site": "east", "room": "3"})
        bert.wait_for(lambda: bert.standing is not None and len(bert.standing.tasks) == 2)
        label(home, anna, {})
        anna.wait_for(lambda: anna.standing is not None and len(anna.standing.tasks) == 1)
        assert bert.take_part(2).verdict is Verdict.COUNTED
        assert bert.await_round(3).version == 1
        # A new session is told anew, though nothing changed.
        bert.standing = None
        bert.open_session()
        bert.wait_for(lambda: bert.standing is not None)
    assert command(home, "status") == 0


def label(home: AggregatorHome, device: ScriptedDevice, labels: dict[str, str]) -> None:
    store = home.open_store()
    store.devices.set_labels(device.require_grant().device_id, labels)
    store.database.close()


def test_a_task_that_matches_no_device_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", ROUND)
    add_task(home, "air", task_text(home, "air", ROUND, more='only = {site = "north"}'))
    with serving(home):
        time.sleep(0.3)
    said = output_of(capsys, home, "status")
    assert "for          0 devices, only site = north" in said
    assert "no device has the labels site = north: no round opens" in said
    found = json.loads(output_of(capsys, home, "status", "--json"))
    assert [each["name"] for each in found["tasks"]] == ["default", "air"]
    assert (found["tasks"][1]["only"], found["tasks"][1]["eligible_devices"]) == ("site = north", 0)


def test_devices_of_one_task_go_on_beside_another(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """The device as its users run it, which knows of no standing; then its task is replaced."""
    home = make_home(tmp_path, mosquitto.url, ROUND)
    add_task(home, "air", task_text(home, "air", ROUND, more='only = {site = ["north"]}'))
    codes = invite(home, 2)
    devices = []
    with serving(home) as served:
        try:
            for number, (code, task) in enumerate(zip(codes, ("default", "air"), strict=True)):
                device = Device.enrol(
                    mosquitto.url,
                    code,
                    tmp_path / f"device-{number}",
                    task=task,
                    options=TrainingOptions(k=4),
                    pace=BRISK,
                    link_settings=QUICK,
                    timeout_seconds=PATIENCE_SECONDS,
                )
                devices.append(device)
                prefix = "item" if task == "default" else "air"
                device.record_all([(f"{prefix}-{row}", "anna") for row in range(8)])
            store = home.open_store()
            for row in store.devices.all():
                store.devices.set_labels(row.device_id, {"site": "north"})
            store.database.close()
            for device in devices:
                device.start()
            tasks = served.parts.tasks.served
            wait_until(lambda: all(task.ingest.counted for task in tasks))
            assert [task.ingest.counted for task in tasks] == [1, 1]
        finally:
            for device in devices:
                device.close()


def test_what_a_device_calls_itself_is_shown_and_lets_it_into_no_task(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND.replace("devices = 2", "devices = 1"))
    add_task(home, "air", task_text(home, "air", ROUND, more='only = {site = ["north"]}'))
    (code,) = invite(home)

    with (
        serving(home) as served,
        Device.enrol(
            mosquitto.url,
            code,
            tmp_path / "device",
            options=TrainingOptions(k=4, labels={"site": "north"}),
            pace=BRISK,
            link_settings=QUICK,
            timeout_seconds=PATIENCE_SECONDS,
        ) as device,
    ):
        device.record_all([(f"item-{row}", "anna") for row in range(8)])
        device.start()
        default, air = served.parts.tasks.served
        wait_until(lambda: default.aggregation.version >= 1)

        def finds_it() -> bool:
            found = json.loads(
                output_of(capsys, home, "devices", "--label", "site=north", "--json")
            )
            return [each["labels"] for each in found] == [{"site": "north"}]

        wait_until(finds_it)  # what devices said is written in groups
        assert (air.rounds.eligible, air.rounds.current) == (0, None)

        def takes_part() -> dict[str, bool]:
            return {each.name: each.takes_part for each in device.tasks()}

        assert not takes_part().get("air") and takes_part()["default"]
        # The operator says the same, and it is the operator's word that counts.
        assert command(home, "devices", "label", device.device_id, "site=north") == 0
        device.record("air-1", task="air")
        wait_until(lambda: air.rounds.eligible == 1 and takes_part().get("air", False))


def test_a_file_that_is_wrong_keeps_its_task_out_and_no_other(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    text = task_text(home, "air", ROUND)
    add_task(home, "air", text)
    with serving(home) as served:
        generation = served.parts.tasks.served[1].rounds.generation
    file = home.task_files / "air.toml"
    file.write_text(text.replace("columns = 8", "colums = 8"))
    codes = invite(home, 2)
    with (
        serving(home) as served,
        ScriptedDevice(mosquitto.url, codes[0], 1) as anna,
        ScriptedDevice(mosquitto.url, codes[1], 2, task="air") as bert,
    ):
        for device in (anna, bert):
            device.enrol().join()
        assert anna.take_part(1).verdict is Verdict.COUNTED
        assert [task.task.name for task in served.parts.tasks.served] == ["default"]
        assert "air: it is not served: " in output_of(capsys, home, "task", "list")
        # Its devices are not told that there is no such task: they would drop what they have.
        identity = UpdateIdentity(bert.require_grant().device_id, "air", generation, 1)
        digest = bert.send(identity, bert.body())
        bert.wait_for(lambda: served.parts.refusals.counts["not-served"] > 0)
        assert digest not in bert.receipts
        # Mended, it is served without a restart.
        file.write_text(text)
        assert bert.take_part(1).verdict is Verdict.COUNTED


def test_the_operator_s_commands_know_of_every_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", ROUND.replace("devices = 2", "devices = 1"))
    enrol(home, [b"a" * 16])
    add_task(home, "air", task_text(home, "air", ROUND.replace("devices = 2", "devices = 1")))
    with serving(home) as served:
        wait_until(lambda: all(task.rounds.current for task in served.parts.tasks.served))
        before = [task.rounds.generation for task in served.parts.tasks.served]
        openings = {
            row.opening for task in served.parts.tasks.served for row in task.store.rounds.latest()
        }
        assert openings == {1, 2}
    store = home.open_store()
    air = store.task(2)
    air.rounds.hold(1, "as the test wants")
    store.database.close()
    said = output_of(capsys, home, "status")
    assert "task         air scatter" in said and "held: as the test wants" in said
    assert command(home, "release", "--task", "default") == 1
    assert "no task 'water'; it has default, air" in error_of(
        capsys, home, "release", "--task", "water"
    )
    assert command(home, "release") == 0
    assert capsys.readouterr().out.startswith("air: round 1 goes on")
    # A backup: both tasks begin anew, above all that devices may have seen.
    store = home.open_store()
    store.task(2).facts.own_generation = before[1] + 40
    store.database.close()
    assert command(home, "restored", "--after", str(before[1] + 50)) == 0
    store = home.open_store()
    for number in (1, 2):
        task = store.task(number)
        assert task.facts.generation > before[1] + 50
        assert task.rounds.latest()[0].closed_unix_seconds is not None
    store.database.close()


def group_key_epochs(parts: Parts) -> tuple[list[int], list[int]]:
    """Epochs of the keys that are stored, and of those that are told: first one, then the other."""
    stored = parts.store.secrets.group_keys
    wait_until(lambda: parts.keys.group_keys()[-1] == stored()[-1])
    return [key.epoch for key in stored()], [key.epoch for key in parts.keys.group_keys()]


def test_a_wide_fleet_of_tasks_has_its_rounds_side_by_side(tmp_path: Path) -> None:
    """No task waits for another, and a device's reply has room for the newest keys alone."""
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", ROUND.replace("devices = 2", "devices = 1"))
    enrol(home, [b"a" * 16])
    for number in range(20):
        name = f"t{number:02}"
        add_task(home, name, task_text(home, name, ROUND.replace("devices = 2", "devices = 1")))
        with serving(home) as served:
            wait_until(lambda: all(task.rounds.current for task in served.parts.tasks.served))
            epochs, told = group_key_epochs(served.parts)
        assert command(home, "rotate", "group") == 0
    assert len(epochs) == 20 and told == epochs[-16:]
