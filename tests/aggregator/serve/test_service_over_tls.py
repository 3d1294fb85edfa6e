"""A new user's first hour: TLS, passwords and the ACL template, all of it by the two commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aggregator.cli import main
from aggregator.home import AggregatorHome
from device_sdk.errors import EnrolmentFailed
from tests.brokers.authority import Authority
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.mosquitto import RECOMMENDED, Mosquitto, password_file
from tests.fakes.homes import ServeProcess
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS, fails_in_the_end, wait_until

TEMPLATE = Path(__file__).parents[3] / "aggregator" / "acl.template"
TASK = """
[task]
catalogue = "items.tsv"
[broker]
url = "{url}"
ca_file = "{ca}"
user = "tessera-aggregator"
password_file = "broker-password"
[round]
wait_for_devices = 2
deadline_seconds = {never}
least_deadline_seconds = {never}
pause_seconds = 0.3
resume_grace_seconds = 1.0
[scatter]
columns = 8
least_squares.most_columns = 0
"""


class Fleet:
    """One folder with an authority, a broker that asks for passwords, and an aggregator's home."""

    def __init__(self, folder: Path, make_mosquitto: MakeMosquitto) -> None:
        self.folder = folder
        authority = Authority(folder)
        self.ca_file = authority.ca_file
        certificate, key = authority.issue("broker")
        users = {"tessera-aggregator": "server", "edge": "devices"}
        passwords = password_file(folder / "passwords", users)
        self.broker: Mosquitto = make_mosquitto(
            f"cafile {self.ca_file}",
            f"certfile {certificate}",
            f"keyfile {key}",
            "allow_anonymous false",
            f"password_file {passwords}",
            f"acl_file {TEMPLATE}",
            *RECOMMENDED,
        )
        self.url = f"mqtts://127.0.0.1:{self.broker.port}"
        self.home = AggregatorHome(folder / "fleet")
        assert main(["init", "--home", str(self.home.folder)]) == 0
        (self.home.folder / "items.tsv").write_text("".join(f"film-{n}\n" for n in range(40)))
        (self.home.folder / "broker-password").write_text("server\n")
        self.home.task_file.write_text(
            TASK.format(url=self.url, ca=self.ca_file, never=NEVER_SECONDS)
        )
        (folder / "edge-password").write_text("devices\n")

    def device(self, name: str) -> str:
        return str(self.folder / name)

    def join(self, name: str, code: str, **other: str) -> subprocess.CompletedProcess[str]:
        told = {
            "ca-file": str(self.ca_file),
            "user": "edge",
            "password-file": str(self.folder / "edge-password"),
            "timeout": "100",
        }
        told.update({key.replace("_", "-"): value for key, value in other.items()})
        options = [part for key, value in told.items() for part in (f"--{key}", value)]
        return subprocess.run(
            [*DEVICE, "join", self.url, code, "--home", self.device(name), *options],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    @contextmanager
    def running(self, name: str) -> Iterator[Path]:
        """``tessera-device run`` until the block ends; its output's file."""
        log = self.folder / f"{name}.log"
        views = self.folder / f"{name}.csv"
        views.write_text("".join(f"{name}-{n % 2},film-{n}\n" for n in range(0, 40, 2)))
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*DEVICE, "run", "--home", self.device(name), "--interactions", str(views)],
                stdout=output,
                stderr=output,
            )
        try:
            yield log
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)

    def status(self, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
        capsys.readouterr()
        assert main(["status", "--home", str(self.home.folder), "--json"]) == 0
        told: dict[str, object] = json.loads(capsys.readouterr().out)
        return told


DEVICE = (sys.executable, "-m", "device_sdk.cli")


@pytest.fixture
def fleet(tmp_path: Path, make_mosquitto: MakeMosquitto) -> Fleet:
    return Fleet(tmp_path, make_mosquitto)


def rows(fleet: Fleet) -> dict[int, tuple[int, int | None, int | None]]:
    """By round: selected, counted, version made."""
    store = fleet.home.open_store()
    found = store.first.rounds.latest(500)
    store.database.close()
    return {row.round: (row.expected, row.participants, row.next_version) for row in found}


def logged(fleet: Fleet) -> int:
    store = fleet.home.open_store()
    found = sum(1 for _ in store.first.log.after(0))
    store.database.close()
    return found


def test_from_nothing_to_a_revoked_device(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(fleet.home.folder)
    capsys.readouterr()
    assert main(["invite", "--home", folder, "--count", "2", "--expires", "24h"]) == 0
    codes = re.findall(r"(?:[A-Z2-7]{8}-){10}[A-Z2-7]{8}", capsys.readouterr().out)
    assert len(codes) == 2
    serve = ServeProcess(fleet.home)
    serve.start()
    try:
        serve.await_connections(1)
        for name, code in zip(("anna", "bert"), codes, strict=True):
            joined = fleet.join(name, code)
            assert joined.returncode == 0, joined.stderr
        with fleet.running("anna") as said:
            # Anna's update is counted; the round waits for Bert's, who is not there yet.
            wait_until(lambda: "counted" in said.read_text(), "anna was not counted")
            assert logged(fleet) == 1
            serve.kill()
            # One of the two is to leave; rounds go on with the other.
            edited = fleet.home.task_file.read_text().replace("devices = 2", "devices = 1")
            fleet.home.task_file.write_text(edited)
            serve.start()
            serve.await_connections(2)
            with fleet.running("bert"):
                wait_until(lambda: rows(fleet).get(4), "no rounds after the restart")
                anna = device_id(fleet, "anna")
                assert main(["revoke", "--home", folder, anna]) == 0
                revoked_in = max(rows(fleet))
                wait_until(
                    lambda: max(rows(fleet)) > revoked_in + 2, "no rounds after the revocation"
                )
                wait_until(
                    lambda: "revoked" in json.dumps(fleet.status(capsys)["refusals"]),
                    "the revoked device was not refused",
                )
        assert serve.stop() == 0
    finally:
        serve.kill()
    made = rows(fleet)
    assert made[1] == (2, 2, 1)  # each once, although the first was sent to another process
    for number, row in made.items():
        if number < revoked_in:
            assert row == (2, 2, number)
        elif number > revoked_in + 1 and row[1] is not None:
            assert row == (1, 1, number)
    assert os.stat(fleet.home.folder).st_mode & 0o777 == 0o700


def device_id(fleet: Fleet, name: str) -> str:
    told = subprocess.run(
        [*DEVICE, "status", "--home", fleet.device(name), "--json"],
        capture_output=True,
        check=True,
    )
    return str(json.loads(told.stdout)["device_id"])


def test_what_a_wrong_password_and_a_wrong_authority_are_told(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    capsys.readouterr()
    assert main(["invite", "--home", str(fleet.home.folder)]) == 0
    code = capsys.readouterr().out.split()[0]
    (tmp_path / "wrong-password").write_text("guess\n")

    def refused(why: str, **settings: str) -> None:
        def join(seconds: float) -> None:
            done = fleet.join("anna", code, timeout=str(seconds), **settings)
            assert "Traceback" not in done.stderr
            if done.returncode != 0:
                raise EnrolmentFailed(done.stderr)

        fails_in_the_end(join, EnrolmentFailed, why, 4.0)

    refused("(?i)user|password|authori[sz]ed", password_file=str(tmp_path / "wrong-password"))
    stranger = Authority(tmp_path, "another authority").ca_file
    refused("(?i)certificate", ca_file=str(stranger))
