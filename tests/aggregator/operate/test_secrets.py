"""No password, token or code that an operator gives comes back out of what the product says."""

from __future__ import annotations

import logging
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from aggregator import Fleet
from aggregator.cli import main
from aggregator.console.pages import PAGES
from aggregator.console.pages.page import PageQuery
from aggregator.errors import AggregatorError
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.mosquitto import free_port
from tests.fakes.homes import ServeProcess, invite, make_home
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

SECRET = "s3cret"
LOGIN = f"fleet:{SECRET}"
NOWHERE = "127.0.0.1:1"
_STORE = f"postgresql://fleet:{SECRET}@{NOWHERE}/fleet"
_URLS = [
    f"mqtt://{LOGIN}@{NOWHERE}",
    f"ws://{NOWHERE}/mqtt?token={SECRET}",
    f"mqtt://{LOGIN}@{NOWHERE}/mqtt",
    f"mqtt://:{SECRET}@{NOWHERE}",
    f"mqtt://{LOGIN}@[{NOWHERE}",
    f"http://{LOGIN}@{NOWHERE}",
    f"{LOGIN}@{NOWHERE}",
]
"""Those that can be read, and some that cannot."""

COMMANDS: dict[str, list[str]] = {
    "init": ["init --home {new}", "init --home {home}"],
    "invite": ["invite --home {home} --list", *["invite --home {home} --withdraw {code}"] * 2],
    "serve": ["serve --home {unserved} --log json"],
    "check": ["check --home {home}", "check --home {home} --json", "check --home {stored}"],
    "status": ["status --home {home}", "status --home {home} --json", "status --home {stored}"],
    "devices": ["devices --home {home}", "devices --home {home} --json"],
    "evaluations": ["evaluations --home {home}", "evaluations --home {home} --json"],
    "models": ["models --home {home}", "models --home {home} --json"],
    "model": ["model --home {home} --out {new}.safetensors"],
    "rollback": ["rollback --home {home} --to 1", "rollback --home {home} --cancel"],
    "revoke": ["revoke --home {home} {code}"],
    "rotate": ["rotate --home {home} keys"],
    "console": [
        "console user add anna --home {home} --password-file {password}",
        "console user list --home {home}",
    ],
    "release": ["release --home {home}"],
    "broker": [
        *(f"broker move {each} --home {{home}}" for each in _URLS),
        *(f"broker move mqtt://127.0.0.2 --own {each} --home {{home}}" for each in _URLS),
        "broker --home {home}",
        "broker stay --home {home}",
    ],
    "store": ["store --home {stored}", "store --home {stored} --move"],
    "task": [
        "task list --home {home}",
        "task check --home {home} --json",
        "task check --home {home} {wrong}",
        "task check --home {home} {wrong} --json",
        "task add more --from {wrong} --home {home}",
        "task replace default --from {wrong} --home {home}",
    ],
    "simulate": ["simulate {wrong}"],
    "runs": ["runs list --folder {new}"],
    "restored": ["restored --home {stored}"],
    "audit": ["audit --home {home} --count 1000", "audit --home {home} --json --count 1000"],
}
"""Each with what makes it say most of what it was given; the audit log is the last to be asked."""
_HAS_NO_SECRET = {"demo"}


class Said:
    """What was said, and by what; an enrolment code stands for its secret."""

    def __init__(self, secrets: list[str]) -> None:
        self._secrets = [SECRET, *secrets]
        self.by: dict[str, str] = {}

    def add(self, whom: str, text: str) -> None:
        self.by[whom] = self.by.get(whom, "") + text

    @property
    def leaks(self) -> dict[str, str]:
        """Lines with a secret."""
        return {
            f"{whom}: {each}": line
            for whom, text in self.by.items()
            for each in self._secrets
            for line in text.splitlines()
            if each.lower() in line.lower()
        }


def test_each_command_is_tried_here() -> None:
    assert set(COMMANDS) | _HAS_NO_SECRET == set(main.commands)


def test_no_command_tells_a_secret(
    tmp_path: Path,
    make_mosquitto: MakeMosquitto,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = make_mosquitto().url.replace("://", f"://{LOGIN}@")
    port = free_port()
    metrics = f'[metrics]\nport = {port}\ntoken_file = "token"\n'
    home = make_home(tmp_path, url, more=metrics)
    stored = make_home(tmp_path / "stored", _URLS[0], more=f'[cluster]\nstore = "{_STORE}"\n')
    unserved = make_home(tmp_path / "unserved", _URLS[2])
    for each in (home, stored, unserved):
        (each.folder / "token").write_text(f"{SECRET}\n")
    (tmp_path / "password").write_text(f"{SECRET} of anna's\n")
    (tmp_path / "wrong.toml").write_text(
        home.task_file.read_text().replace(url, f"mqtt://{LOGIN}@{NOWHERE}/x")
        + f'[broker.odd]\nproxy = "http://{LOGIN}@"\n'
    )
    code, *_ = invite(home)
    names = {
        "home": str(home.folder),
        "stored": str(stored.folder),
        "unserved": str(unserved.folder),
        "password": str(tmp_path / "password"),
        "wrong": str(tmp_path / "wrong.toml"),
        "new": str(tmp_path / "new"),
        "code": code,
    }
    said = Said([code, code.replace("-", ""), code[-17:]])
    serve, away = ServeProcess(home), ServeProcess(stored)
    serve.start()
    away.start()
    try:
        serve.await_connections(1)
        wait_until(lambda: _scraped(port, "/metrics"), serve.log.read_text)
        for whole in (line for lines in COMMANDS.values() for line in lines):
            capfd.readouterr()
            try:
                main(whole.format_map(names).split())
            except SystemExit as ended:  # argparse's
                said.add(whole, str(ended))
            said.add(whole, "".join(capfd.readouterr()))
        for path in ("/metrics", "/readyz", "/healthz"):
            said.add(path, _scraped(port, path))
        with Fleet.open(home.folder) as fleet:
            for page in PAGES:
                with suppress(AggregatorError):  # of a device, and none is asked for
                    said.add(f"page {page.title}", repr(page.read(fleet, PageQuery(()))))
            said.add("problems", repr([each.as_json() for each in fleet.health().problems]))
        wait_until(lambda: NOWHERE in away.log.read_text(), away.log.read_text)
    finally:
        serve.stop()
        away.stop()
    for each in (home, stored):
        said.add("audit.jsonl", each.audit_file.read_text() if each.audit_file.exists() else "")
    for process in (serve, away):
        said.add("serve's log", process.log.read_text())
    said.add("this process's log", caplog.text)
    assert said.leaks == {}
    assert "127.0.0.2" in said.by["audit.jsonl"], "it was tried"


def _scraped(port: int, path: str) -> str:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    asked.add_header("Authorization", f"Bearer {SECRET}")
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as found:
            text: str = found.read().decode()
            return text
    except urllib.request.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""
