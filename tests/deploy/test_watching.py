"""Alerts and the dashboard: Prometheus reads them, and all that they name is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aggregator.evaluation import Figure
from aggregator.operate.problems import FleetProblem
from aggregator.serve.metrics import Snapshot, TaskSnapshot, Told, registry_of
from aggregator.store.evaluations import EvaluatedVersion
from tests.fakes.waiting import PATIENCE_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "tessera.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
_ADDED_BY_PROMETHEUS = {"job", "instance"}


@cache
def why_not(name: str) -> str | None:
    """Why a program of Prometheus' cannot be run here; None where it can."""
    program = shutil.which(name)
    if program is None:
        return f"{name} is not installed (apt-get install prometheus)"
    try:
        subprocess.run(
            [program, "--version"], capture_output=True, timeout=PATIENCE_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{name} does not work here: {error}"
    return None


def promtool(*arguments: str) -> str:
    """What it says; the test fails where it finds something wrong."""
    if reason := why_not("promtool"):
        pytest.skip(reason)
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def exported() -> dict[str, set[str]]:
    """The labels of each series that an aggregator shows once it has seen everything."""
    own = (0.1, 0.2, 0.2, 0.3, 0.3, 0.3, 0.4, 0.5, 0.6)
    figure = Figure("personal", "hr10", "k=8", 40, 900.0, 1, 0.25, 0.0, 0.3, own)
    compared = Figure(
        **{name: getattr(figure, name) for name in figure.__slots__}
        | dict.fromkeys(("over_alone", "over_alone_half_width"), 0.1)
        | dict.fromkeys(("over_received", "over_received_half_width"), 0.1)
    )
    task = TaskSnapshot(
        name="films",
        version=5,
        current=None,
        seconds_left=None,
        arrived=1,
        participants=1,
        quorum=1,
        counted=1,
        widths={8: 1},
        outcomes={("failed", "disk"): 1},
        evaluated=EvaluatedVersion(4, 7, (compared,)),
    )
    seen = Snapshot(True, "mqtt://h", 1, 1, 1, 1, (task, task), {"late": 1})
    told = Told(lambda: seen, lambda: [FleetProblem("round-held", "it is", "air")])
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry_of(told)).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def of_the_dashboard() -> list[str]:
    """Its queries, with what Grafana puts in the place of its variables."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [re.sub(r"\$\w+", "x", each.replace("$__rate_interval", "5m")) for each in found]


def of_the_alerts() -> list[str]:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


@pytest.mark.parametrize("expressions", [of_the_dashboard, of_the_alerts])
def test_what_is_asked_for_is_exported_with_its_labels(expressions: Any) -> None:
    there, wrong = exported(), []
    for expression in expressions():
        for name, matchers in re.findall(r"\b(tessera_\w+)(\{[^}]*\})?", expression):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) - _ADDED_BY_PROMETHEUS
            if name not in there or not labels <= there[name]:
                wrong.append((name, labels, expression))
    assert not wrong


def test_prometheus_reads_the_dashboards_queries(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{at}", "expr": each} for at, each in enumerate(of_the_dashboard())]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))


def test_panels_have_ids_and_places_of_their_own() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (at["x"] + right, at["y"] + down) for right in range(at["w"]) for down in range(at["h"])
        }
        assert at["x"] + at["w"] <= 24 and taken.isdisjoint(cells), panel["title"]
        taken |= cells


def test_prometheus_reads_the_configuration() -> None:
    assert "SUCCESS" in promtool(
        "check", "config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.yaml")
    )


@pytest.mark.slow
def test_each_alert_is_set_off_by_its_cause_alone() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(ALERTS.with_name("alerts_test.yaml")))


def test_each_alert_is_tested() -> None:
    names = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    tested = ALERTS.with_name("alerts_test.yaml").read_text()
    assert names and not [name for name in names if name not in tested]


def test_alerts_have_a_severity_and_say_what_to_do() -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("error", "warning"), rule["alert"]
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
