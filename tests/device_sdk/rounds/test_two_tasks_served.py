"""One device, an aggregator with two tasks, a real broker between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_sdk.cli import main
from device_sdk.device import Device
from device_sdk.world import TrainingOptions
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.array_device import local_data
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import command, invite, make_home, serving
from tests.fakes.quick import joined
from tests.fakes.tasks import task_text
from tests.fakes.waiting import endless, wait_until

ROUND = "quorum = 1\npause_seconds = 0.2"


def test_one_home_takes_part_in_a_task_on_clicks_and_one_on_arrays(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    linear_artifact(tmp_path / "linear")
    air = tmp_path / "air.toml"
    air.write_text(
        f'[task]\nname = "air"\nmethod = "fedavg"\nartifacts = ["{tmp_path / "linear"}"]\n'
        # The device declines the first round, and nobody else takes part in it.
        f"[round]\n{ROUND}\ndeadline_seconds = 3.0\n"
        "[fedavg.training]\nepochs = 1\nlearning_rate = 0.1\n"
    )
    (code,) = invite(home)
    options = TrainingOptions(k=4)
    with serving(home):
        folder = tmp_path / "device"
        device = joined(mosquitto.url, code, folder, options=options)
        with device:
            device.record_all([(f"item-{n}", "anna") for n in range(5)])
            device.start()
            wait_until(lambda: device.status().verdict == "counted")
            # The fleet gets a second task; nobody enrols again.
            assert command(home, "task", "add", "air", "--from", str(air)) == 0
            wait_until(lambda: len(device.tasks()) == 2)
            wait_until(lambda: {each.name: each.outcome for each in device.tasks()}["air"] != "")
            of_air, of_clicks = device.tasks()
            assert (of_air.name, of_air.method, of_air.outcome) == ("air", "fedavg", "declined")
            assert not of_air.takes_part and "given no data" in of_air.why_not
            assert of_clicks.takes_part and of_clicks.method == "scatter"
            assert device.status().task == "default", "one that it takes part in, as before"
            device.provide(local_data(0), task="air")
            wait_until(lambda: device.status(task="air").verdict == "counted")
            with pytest.raises(ValueError, match=r"name one, task='air' \(air, default\)"):
                device.status()
            assert device.predict({"x": local_data(0).train["x"]})["prediction"].shape[0] == 10
            assert len(device.recommend(3, user="anna")) == 3
            assert set(device.learner_state(task="default")) >= {"users"}
            assert device.model(task="air").task == "air"
            capsys.readouterr()
            assert main(["status", "--home", str(folder)]) == 0
            told = capsys.readouterr().out
            assert "fedavg" in told and "scatter" in told
            # Gone again: the model stays, to predict with.
            assert command(home, "task", "retire", "air") == 0
            wait_until(lambda: not device.tasks()[0].takes_part)
            assert "does not serve it" in device.tasks()[0].why_not
            last = device.status().receipted_round or 0
            wait_until(lambda: (device.status().receipted_round or 0) > last)
            assert device.predict({"x": local_data(0).train["x"]})["prediction"].shape[0] == 10
            assert device.status().problem == ""
        with Device.open(folder, data={"air": local_data(0)}, options=options) as again:
            assert [each.takes_part for each in again.tasks()] == [False, True]


def test_what_a_running_device_leaves_out_is_told_beside_it(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    (code,) = invite(home)
    folder, options = tmp_path / "device", TrainingOptions(k=4)
    films = tmp_path / "films.toml"
    films.write_text(task_text(home, "films", ROUND))
    with serving(home):
        joined(mosquitto.url, code, folder, options=options).close()
        assert command(home, "task", "add", "films", "--from", str(films)) == 0
        with Device.open(folder, options=options, tasks=["default"]) as device:
            device.record_all([(f"item-{n}", "anna") for n in range(5)])
            device.start()
            wait_until(lambda: device.status().verdict == "counted")
            wait_until(lambda: len(device.tasks()) == 2)
            with Device.open(folder, read_only=True) as beside:
                wait_until(lambda: beside.tasks() == device.tasks())
                why_not = {each.name: each.why_not for each in beside.tasks()}
                chosen = "not among the tasks chosen: default"
                assert why_not == {"default": "", "films": chosen}
                assert beside.status().task == "default"
            capsys.readouterr()
            assert main(["status", "--home", str(folder)]) == 0
            assert f"no: {chosen}" in capsys.readouterr().out
            device.stop()
            assert [each.why_not for each in device.tasks()] == ["", chosen]


def test_two_tasks_share_their_catalogue_and_their_artifact(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """Two methods compared on one fleet; one of them goes, and nothing that the other needs."""
    home = make_home(tmp_path, mosquitto.url, ROUND)
    linear_artifact(tmp_path / "linear")
    for name, rate in (("air", 0.1), ("water", 0.05)):
        (tmp_path / f"{name}.toml").write_text(
            f'[task]\nmethod = "fedavg"\nartifacts = ["linear"]\n[round]\n{endless(ROUND)}\n'
            f"[fedavg.training]\nepochs = 1\nlearning_rate = {rate}\n"
        )
    (tmp_path / "films.toml").write_text(
        f'[task]\ncatalogue = "{home.folder}/items.tsv"\n'
        f"[round]\n{endless(ROUND)}\n[scatter]\ncolumns = 4\n"
    )
    codes = invite(home, 2)
    options = TrainingOptions(k=4)

    def enrolled(code: str, name: str) -> Device:
        device = joined(mosquitto.url, code, tmp_path / name, options=options)
        for task in ("air", "water"):
            device.provide(local_data(0), task=task)
        for task in ("default", "films"):
            device.record_all([(f"item-{n}", "anna") for n in range(5)], task=task)
        device.start()
        return device

    def counts(device: Device, *names: str) -> bool:
        # The tasks that are there, and that counted an update of this device.
        known = {each.name for each in device.tasks()}
        return all(
            name in known and device.status(task=name).verdict == "counted" for name in names
        )

    with serving(home) as served:
        for name in ("air", "water", "films"):
            assert command(home, "task", "add", name, "--from", str(tmp_path / f"{name}.toml")) == 0
        with enrolled(codes[0], "one") as one:
            wait_until(lambda: counts(one, "air", "water", "default", "films"))
            contents = served.parts.store.contents.all().values()
            assert {each.tasks for each in contents} == {(1, 4), (2, 3)}
            # What goes leaves what others need; the first task cannot go, and loses nothing.
            for name in ("air", "films"):
                assert command(home, "task", "retire", name) == 0
            last = one.status(task="water").receipted_round or 0
            wait_until(lambda: (one.status(task="water").receipted_round or 0) > last)
            # Beside the first, for whom each round waits.
            with enrolled(codes[1], "other") as other:
                wait_until(lambda: counts(other, "water", "default"))
                other.leave()
                assert other.status().left, "which task's status is asked for is of no matter then"
        contents = served.parts.store.contents.all().values()
        assert {each.tasks for each in contents} == {(1,), (3,)}
        wait_until(lambda: not served.parts.store.retained.superseded())
        assert command(home, "task", "retire", "water") == 0
        wait_until(lambda: not served.parts.store.retained.superseded())
        contents = served.parts.store.contents.all().values()
        assert {each.tasks for each in contents} == {(1,)}
