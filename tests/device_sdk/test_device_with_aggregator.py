"""The device and the aggregator as their users run them: processes, Mosquitto between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from device_sdk.device import Device
from device_sdk.errors import EnrolmentRefused, NothingLearnt
from device_sdk.world import TrainingOptions
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.homes import ServeProcess, command, invite
from tests.fakes.quick import joined, run_python
from tests.fakes.waiting import NEVER_SECONDS, wait_until

_TASK = """
[task]
catalogue = "items.tsv"
[broker]
url = "{url}"
[round]
deadline_seconds = {never}
wait_for_devices = {wait}
quorum = 1
most_rounds = {rounds}
pause_seconds = 0.1
resume_grace_seconds = 1.0
[scatter]
columns = 16
"""


class Operator:
    """Of a fleet of 60 films, which is served by a process of its own."""

    def __init__(
        self, folder: Path, url: str, rounds: int, wait: int = 2, task: str = _TASK
    ) -> None:
        self._home = AggregatorHome(folder / "fleet")
        assert command(self._home, "init") == 0
        filled = task.format(url=url, rounds=rounds, wait=wait, never=NEVER_SECONDS)
        self._home.task_file.write_text(filled)
        items = "".join(f"film-{n}\tFilm {n}\n" for n in range(60))
        (self._home.folder / "items.tsv").write_text(items)

    def codes(self, count: int) -> list[str]:
        return invite(self._home, count)

    def revoke(self, device_id: str) -> None:
        assert command(self._home, "revoke", device_id) == 0

    @contextmanager
    def serving(self) -> Iterator[ServeProcess]:
        process = ServeProcess(self._home)
        process.start()
        try:
            yield process
        finally:
            process.kill()


def enrolled(url: str, code: str, home: Path, first: int) -> Device:
    device = joined(url, code, home, options=TrainingOptions(k=8))
    device.record_all([(f"film-{n}", "anna") for n in range(first, first + 8)])
    return device


def await_status(device: Device, version: int) -> None:
    wait_until(lambda: device.status().version == version)


def test_two_devices_and_an_aggregator_that_is_killed_finish_their_rounds(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    operator = Operator(tmp_path, mosquitto.url, rounds=6)
    codes = operator.codes(2)
    with operator.serving() as serving:
        devices = [
            enrolled(mosquitto.url, code, tmp_path / f"home-{n}", 10 * n)
            for n, code in enumerate(codes)
        ]
        with pytest.raises(NothingLearnt, match="no model to take out"):
            devices[0].model()
        for device in devices:
            device.start()
        await_status(devices[0], 1)
        serving.kill()
    with operator.serving():
        for device in devices:
            await_status(device, 6)  # the last one, published for good
    for device in devices:
        status = device.status()
        assert (status.outbox, status.outcome, status.trained_round) == (0, "read", 6)
        assert status.verdict == "counted", status
        assert len(device.recommend(60, user="anna")) == 52
        model = device.model()
        assert (model.task, model.version) == ("default", 6)
        assert len(model.items) == len(model.arrays["items"]) == 60
        assert model.items[3] == "film-3" and model.arrays.keys() == {"items", "strengths", "solve"}
        model.arrays["items"][:] = 0  # a copy
        assert device.model().arrays["items"].any()
        device.close()


def test_a_revoked_device_gets_no_further_and_says_so(mosquitto: Mosquitto, tmp_path: Path) -> None:
    operator = Operator(tmp_path, mosquitto.url, rounds=0, wait=1)
    first, second = operator.codes(2)
    with (
        operator.serving(),
        enrolled(mosquitto.url, first, tmp_path / "first", 0) as stays,
        enrolled(mosquitto.url, second, tmp_path / "second", 10) as goes,
    ):
        stays.start()
        goes.start()
        wait_until(lambda: goes.status().verdict == "counted")
        operator.revoke(goes.device_id)
        wait_until(lambda: "revoked" in goes.status().problem)
        last = goes.status().trained_round
        here = stays.status().trained_round
        wait_until(lambda: (stays.status().trained_round or 0) >= (here or 0) + 2)
        assert goes.status().trained_round == last
        assert len(goes.recommend(3, user="anna")) == 3  # what was learnt stays


def test_a_device_that_is_revoked_in_no_round_learns_of_it_at_once(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    operator = Operator(tmp_path, mosquitto.url, rounds=0, wait=9)  # no round opens
    (code,) = operator.codes(1)
    with operator.serving(), enrolled(mosquitto.url, code, tmp_path / "device", 0) as device:
        told: list[str] = []
        device.on("problem", lambda event: told.append(event.text))
        device.start()
        wait_until(lambda: device.status().session)
        operator.revoke(device.device_id)
        wait_until(lambda: "this device was revoked: " in device.status().problem)
        with Device.open(tmp_path / "device", read_only=True) as beside:
            wait_until(lambda: "this device was revoked: " in beside.status().problem)
        wait_until(lambda: any("another code" in each for each in told))


def test_the_embed_example_joins_learns_and_recommends(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    operator = Operator(tmp_path, mosquitto.url, rounds=3)
    first, second = operator.codes(2)
    with (
        operator.serving(),
        enrolled(mosquitto.url, first, tmp_path / "first", 0) as device,
    ):
        device.start()
        (tmp_path / "app").mkdir()
        done = run_python(
            "-m",
            "examples.embed",
            mosquitto.url,
            "film-3",
            "film-4",
            input=f"{second}\n",
            cwd=tmp_path / "app",
            env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 5 and all("Film " in line for line in lines)
        with pytest.raises(EnrolmentRefused, match="used by another"):
            enrolled(mosquitto.url, second, tmp_path / "third", 0)
        home = tmp_path / "app" / "tessera-home"
        told = run_python(
            "-m", "device_sdk.cli", "status", "--home", str(home), "--json", check=True
        )
        assert json.loads(told.stdout)["trained_round"] >= 1
