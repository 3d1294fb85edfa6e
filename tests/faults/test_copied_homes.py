"""A home that was copied to a second machine: both ends name it, and the two take turns."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from device_sdk import Device, Pace
from device_sdk.rounds.session import CLASH
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK
from tests.fakes.homes import command, invite, make_home, serving
from tests.fakes.outputs import output_of
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

ROUND = "least_deadline_seconds = 0.1\npause_seconds = 0.1"
SOON = replace(QUICK, yield_seconds=0.5, most_yield_seconds=1.0)
PACE = Pace(answer_seconds=0.5, reopen_seconds=0.2, most_seconds=1.0, fetch_seconds=1.0)


def test_two_machines_with_one_identity_are_named_on_both_ends(
    tmp_path: Path, make_mosquitto: MakeMosquitto, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = make_mosquitto()
    home = make_home(tmp_path, broker.url, ROUND)
    (code,) = invite(home)
    folders = [tmp_path / name for name in ("first", "second")]
    with serving(home, link_settings=QUICK):
        with Device.enrol(broker.url, code, folders[0], timeout_seconds=PATIENCE_SECONDS) as device:
            device.record_all((f"item-{row}", "anna") for row in range(5))
            device.start()
            wait_until(lambda: (device.status().receipted_round or 0) >= 1)
            device.stop()
            device.start()  # the same machine again is no other
            wait_until(lambda: device.status().session)
            assert command(home, "devices") == 0
            assert "two machines" not in capsys.readouterr().out
        shutil.copytree(folders[0], folders[1])
        with (
            Device.open(folders[0], link_settings=SOON, pace=PACE) as first,
            Device.open(folders[1], link_settings=SOON, pace=PACE) as second,
        ):
            for each in (first, second):
                each.start()
            for each in (first, second):
                wait_until(lambda each=each: CLASH in each.status().problem)
            assert "on two machines" in output_of(capsys, home, "devices")
            assert "warning      two machines have the identity of" in output_of(
                capsys, home, "status"
            )
            told = json.loads(output_of(capsys, home, "status", "--json"))
            clashes = [each for each in told["problems"] if each["code"] == "two-machines"]
            assert [each["device_ids"] for each in clashes] == [[first.device_id]]
            counted = first.status().receipted_round or 0
            wait_until(
                lambda: (
                    max(each.status().receipted_round or 0 for each in (first, second))
                    > counted + 1
                )
            )
