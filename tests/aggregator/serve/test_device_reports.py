"""What an operator sees of the devices, by the commands, over a real broker."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.cli import main as aggregator
from device_sdk.cli import main as device_command
from device_sdk.device import Device
from device_sdk.errors import LeaveUnanswered, NotEnrolled
from device_sdk.local_data import LocalData
from device_sdk.world import TrainingOptions
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto, free_port
from tests.fakes.array_device import local_data
from tests.fakes.brisk import BRISK
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import ServeProcess
from tests.fakes.homes import make_home as make_clicks
from tests.fakes.killed_rounds import make_home
from tests.fakes.tasks import add_task
from tests.fakes.waiting import PATIENCE_SECONDS, endless, wait_until

_MORE = {"epochs": 1, "batch_size": 0, "learning_rate": 0.1}


def bad_data() -> LocalData:
    """Samples of which one is NaN."""
    good = dict(local_data(1).train)
    good["y"] = good["y"].copy()
    good["y"][3, 0] = np.nan
    return LocalData(good)


def test_a_device_with_nan_data_is_shown_by_reason_and_another_leaves(
    mosquitto: Mosquitto,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    linear_artifact(tmp_path / "linear")
    home = make_home(tmp_path, mosquitto.url, method="fedavg", settings=_MORE)
    text = home.task_file.read_text()
    text = re.sub(r"most_rounds = \d+", "most_rounds = 0", text)
    text = re.sub(r"quorum = \d+", "quorum = 1", text)
    port = free_port()
    home.task_file.write_text(f"{text}\n[metrics]\nport = {port}\n")

    def said(*arguments: str) -> str:
        capsys.readouterr()
        assert aggregator([arguments[0], "--home", str(home.folder), *arguments[1:]]) == 0
        return capsys.readouterr().out

    def listed(*arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(said("devices", "--json", *arguments))
        return found

    codes = [
        said("invite", "--name", "hall-1", "--label", "site=north").strip(),
        said("invite", "--name", "hall-2", "--label", "site=south").strip(),
        *said("invite", "--count", "1").split(),
    ]
    assert "does not run" in said("status")
    serve = ServeProcess(home)
    serve.start()
    devices: list[Device] = []
    try:
        for place, (code, data) in enumerate(
            zip(codes, (local_data(0), bad_data(), local_data(2)), strict=True)
        ):
            own = TrainingOptions(labels={"site": "own", "line": f"l{place}"})
            device = Device.enrol(
                mosquitto.url, code, tmp_path / f"device-{place}", data=data, options=own,
                pace=BRISK, link_settings=QUICK, timeout_seconds=PATIENCE_SECONDS,
            )  # fmt: skip
            devices.append(device)
            device.start()
        wait_until(lambda: [bool(each["tasks"][0]["outcome"]) for each in listed()] == [True] * 3)
        shown = {str(each["name"]): each for each in listed()}
        (bad,) = shown["hall-2"]["tasks"]
        assert (bad["task"], bad["outcome"], bad["reason"]) == ("default", "failed", "not-finite")
        assert bad["counted_unix_seconds"] is None
        # The operator's labels win over the device's own.
        assert shown["hall-1"]["labels"] == {"site": "north", "line": "l0"}
        (good,) = shown["hall-1"]["tasks"]
        assert (good["outcome"], good["option"]) == ("trained", "linear")
        assert str(shown["hall-1"]["platform"]).startswith("linux-") and shown["hall-1"]["sdk"]
        assert [each["name"] for each in listed("--label", "site=south")] == ["hall-2"]
        table = said("devices")
        assert "hall-2" in table and "failed: not-finite" in table
        status = said("status")
        assert "serve        runs" in status
        (told,) = [line for line in status.splitlines() if line.startswith("failed: not-finite")]
        assert told.endswith("  hall-2")
        # Rounds end when everybody was heard, although one of them trains in none.
        before = json.loads(said("status", "--json"))["rounds"][0]["round"]
        wait_until(lambda: json.loads(said("status", "--json"))["rounds"][0]["round"] >= before + 2)
        # On the device, the log has its words once, and the status for as long as it lasts.
        assert caplog.text.count("Look for NaN") == 1 and ": not-finite\n" in caplog.text
        assert "Look for NaN" in devices[1].status().problem
        address = f"http://127.0.0.1:{port}/metrics"

        def failed() -> int:
            with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as answer:
                found = re.search(
                    r'device_outcomes_total\{outcome="failed",reason="not-finite"} (\d+)',
                    answer.read().decode(),
                )
            return 0 if found is None else int(found[1])

        wait_until(lambda: failed() >= 1)  # it shows what was counted a moment ago

        said("devices", "label", "hall-2", "site=west", "line=", "--name", "hall-two")
        (renamed,) = listed("--label", "site=west")
        assert renamed["name"] == "hall-two"
        assert aggregator(["devices", "--home", str(home.folder), "label", "hall-9", "a=b"]) == 1

        third = devices[2]
        third.leave(timeout_seconds=PATIENCE_SECONDS)
        third.leave(timeout_seconds=PATIENCE_SECONDS)  # it has left
        assert third.status().left and third.status().outbox == 0
        (task,) = third.tasks()
        assert not task.takes_part and task.why_not == "this device has left its fleet"
        assert third.status().trained_round is not None, "of the task that it took part in"
        with pytest.raises(NotEnrolled, match="left its fleet"):
            third.start()
        (gone,) = [each for each in listed() if each["device_id"] == third.device_id]
        assert gone["revoked_unix_seconds"] is not None and gone["tasks"][0]["outcome"] is None
        assert gone["tasks"][0]["option"] is None
        assert third.predict({"x": local_data(2).train["x"]})["prediction"].shape[1] > 0

        serve.stop()
        second = devices[1]
        with pytest.raises(LeaveUnanswered, match="call leave"):
            second.leave(timeout_seconds=1)
        serve.start()
        second.close()
        folder = str(tmp_path / "device-1")
        assert device_command(["leave", "--home", folder, "--timeout", "100"]) == 0
        assert "has left" in capsys.readouterr().out
        assert device_command(["status", "--home", folder]) == 0
        assert "this device has left" in capsys.readouterr().out
    finally:
        for device in devices:
            device.close()
        serve.stop()


def test_what_a_device_did_last_is_shown_for_each_task(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails in a task and trains in another is both."""
    linear_artifact(tmp_path / "linear")
    lines = endless("quorum = 1\npause_seconds = 600.0")
    home = make_clicks(tmp_path, mosquitto.url, lines)
    air = (
        f'[task]\nmethod = "fedavg"\nartifacts = ["{tmp_path / "linear"}"]\n'
        f"[round]\n{lines}\n[fedavg.training]\nepochs = 1\nlearning_rate = 0.1\n"
    )
    add_task(home, "air", air)

    def said(*arguments: str) -> str:
        capsys.readouterr()
        assert aggregator([arguments[0], "--home", str(home.folder), *arguments[1:]]) == 0
        return capsys.readouterr().out

    def outcomes(*arguments: str) -> list[tuple[str, str, str]]:
        (shown,) = json.loads(said("devices", "--json", *arguments))
        return [(each["task"], each["outcome"], each["reason"]) for each in shown["tasks"]]

    code = said("invite", "--name", "hall-2").strip()
    serve = ServeProcess(home)
    serve.start()
    try:
        with Device.enrol(
            mosquitto.url, code, tmp_path / "device", data={"air": bad_data()},
            options=TrainingOptions(k=4), pace=BRISK, link_settings=QUICK,
            timeout_seconds=PATIENCE_SECONDS,
        ) as device:  # fmt: skip
            device.record_all([(f"item-{n}", "anna") for n in range(5)])
            device.start()
            wait_until(lambda: None not in [outcome for _, outcome, _ in outcomes()])
            failed = ("air", "failed", "not-finite")
            assert outcomes() == [("default", "trained", ""), failed]
            assert outcomes("--task", "air") == [failed]
            # All is written down when the round has closed, however far off the next one is.
            wait_until(lambda: "never" not in said("devices", "--task", "default"))
            heading, clicks, of_air = said("devices").splitlines()
            assert heading.split()[7:9] == ["task", "round"]
            assert "hall-2" in clicks and "trained" in clicks and "k=4" in clicks
            assert "hall-2" in of_air and "failed: not-finite" in of_air and "never" in of_air
            status = said("status", "--task", "air")
            assert "  hall-2" in status and "default" not in status
    finally:
        serve.stop()
