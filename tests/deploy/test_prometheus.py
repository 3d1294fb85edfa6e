"""A real Prometheus, configured as the example says, scrapes a real serve while devices train."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.mosquitto import free_port
from tests.deploy.test_watching import DEPLOY, of_the_dashboard, why_not
from tests.fakes.homes import ServeProcess, invite, make_home
from tests.fakes.quick import joined
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

_DEVICES = 2
_TOKEN = "of the port"


class Prometheus:
    """One that runs, by its query API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer; None while it gives none."""
        try:
            url = f"{self._url}/{path}?{urllib.parse.urlencode(query)}"
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as found:
                answer = json.load(found)
        except OSError:
            return None
        return answer["data"] if answer["status"] == "success" else None

    def value(self, expression: str) -> float | None:
        """Of the only series that an expression has."""
        found = self.ask("query", query=expression)
        return float(found["result"][0]["value"][1]) if found and found["result"] else None


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """By the example's files, but for where it asks, how often, and the token."""
    if reason := why_not("prometheus"):
        pytest.skip(reason)
    (folder / "token").write_text(_TOKEN)
    text = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
    for said, here in (
        ("15s", "1s"),
        ("aggregator.example:9464", target),
        ("/etc/prometheus/tessera-token", str(folder / "token")),
    ):
        assert said in text
        text = text.replace(said, here)
    (folder / "prometheus.yaml").write_text(text)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yaml", folder)
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(port)
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


def test_it_has_what_a_round_of_a_real_serve_told(
    tmp_path: Path, make_mosquitto: MakeMosquitto
) -> None:
    port, url = free_port(), make_mosquitto().url
    metrics = f'[metrics]\nport = {port}\ntoken_file = "token"\n'
    home = make_home(tmp_path, url, f"quorum = {_DEVICES}", metrics)
    (home.folder / "token").write_text(_TOKEN)
    folder = tmp_path / "prometheus"
    folder.mkdir()
    serve = ServeProcess(home)
    with ExitStack() as stack:
        asked = stack.enter_context(prometheus(folder, f"127.0.0.1:{port}"))
        stack.callback(serve.stop)
        serve.start()
        for number, code in enumerate(invite(home, _DEVICES)):
            device = stack.enter_context(joined(url, code, tmp_path / f"device-{number}"))
            device.record_all((f"item-{row}", "anna") for row in range(5))
            device.start()

        def log() -> str:
            said = (folder / "prometheus.log").read_text()
            return f"{said}\n{serve.log.read_text()}"

        def at_least(expression: str, least: float) -> None:
            wait_until(lambda: (asked.value(expression) or 0.0) >= least, log)

        at_least('up{job="tessera"}', 1)
        at_least("tessera_connected", 1)
        at_least("tessera_devices", _DEVICES)
        at_least("tessera_model_version", 1)
        at_least("tessera_updates_counted_total", _DEVICES)
        at_least('tessera_device_outcomes_total{outcome="trained"}', _DEVICES)
        errors = 'count(tessera_problem{severity="error"})'
        wait_until(lambda: asked.value(errors) is None, log)
        assert [each for each in of_the_dashboard() if asked.ask("query", query=each) is None] == []
        wait_until(lambda: {each["health"] for each in _rules(asked)} == {"ok"}, log)
        serve.stop()
        wait_until(lambda: asked.value('up{job="tessera"}') == 0, log)


def _rules(asked: Prometheus) -> list[dict[str, Any]]:
    found = asked.ask("rules") or {"groups": []}
    return [rule for group in found["groups"] for rule in group["rules"]]
