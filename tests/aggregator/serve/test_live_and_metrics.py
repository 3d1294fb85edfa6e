"""What an operator, and Prometheus, get to see."""

from __future__ import annotations

import io
import math
import re
import time
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from aggregator.errors import AggregatorError
from aggregator.evaluation.figures import Figure
from aggregator.methods.method import RoundSummary
from aggregator.rounds.machine import RoundClosed, RoundHeld, RoundOpened
from aggregator.serve.live import describe, render
from aggregator.serve.metrics import Snapshot, TaskSnapshot, format_metrics, serve_metrics
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.store.rounds import RoundRow
from aggregator.task.file import MetricsSettings
from tests.fakes.waiting import PATIENCE_SECONDS

NOW = time.time()
OPEN = RoundRow(7, 1, 5, NOW - 30, NOW + 30, bytes(32), 2**64 - 1, 48, 20)
CLOSED = RoundRow(
    6,
    1,
    4,
    NOW - 90,
    NOW,
    bytes(32),
    2**64 - 1,
    48,
    20,
    NOW - 30,
    5,
    47,
    {"gradient_norm": 2.5},
    took_seconds=60.0,
)
FILMS = TaskSnapshot(
    name="films",
    version=5,
    current=OPEN,
    seconds_left=30.0,
    arrived=12,
    participants=12,
    quorum=40,
    counted=300,
    widths={8: 4, 64: 8},
    finished=(CLOSED,),
)
SEEN = Snapshot(
    connected=True,
    broker="mqtt://h:1883",
    devices=48,
    sessions=47,
    bytes_received=1_234_567,
    bytes_sent=99,
    tasks=(FILMS,),
    refusals={"late": 2},
)


def shown(seen: Snapshot) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(seen))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_live_view_shows_rounds_devices_and_refusals() -> None:
    text = shown(SEEN)
    for part in ("version 5", "12 of 48", "quorum 12/40", "k=8: 4", "1.2 MB", "late 2", "version"):
        assert part in text
    assert "no connection" in shown(replace(SEEN, connected=False))
    deaf = replace(SEEN, refused_subscriptions=("tessera/up/+/+",))
    assert "refuses the subscription to tessera/up/+/+" in shown(deaf)
    lossy = replace(SEEN, broker_losses=2)
    assert "max_queued_messages" in shown(lossy) and "max_queued_messages" not in shown(SEEN)
    held = RoundRow(7, 1, 5, NOW, NOW, bytes(32), 1, 48, 20, held="quarantine")
    assert "held: quarantine" in shown(only(current=held))
    unsealed = only(current=None, unpublished="too large a value")
    assert "held: too large a value" in shown(unsealed)
    assert "tessera_round_held 1" in format_metrics(unsealed)
    assert "between two rounds" in shown(only(current=None))
    few = only(current=None, eligible=3, wait_for_devices=4)
    assert "no round opens: 3 of 4 devices" in shown(few)


def only(**changes: Any) -> Snapshot:
    """With one task, that of ``SEEN`` but for these changes."""
    return replace(SEEN, tasks=(replace(FILMS, **changes),))


def test_each_of_several_tasks_has_a_section_and_series_of_its_own() -> None:
    air = replace(FILMS, name="air", version=2, current=None, paused=True, widths={}, eligible=3)
    seen = replace(SEEN, tasks=(FILMS, air))
    text = shown(seen)
    for part in ("2 tasks", "films, version 5", "air, version 2, for 3 devices, paused", "600"):
        assert part in text
    lines = format_metrics(seen).splitlines()
    assert 'tessera_model_version{task="films"} 5' in lines
    assert 'tessera_model_version{task="air"} 2' in lines
    assert 'tessera_round_updates_by_k{task="films",k="64"} 8' in lines
    assert "tessera_devices 48" in lines


def test_events_in_words() -> None:
    assert "begins with 3 updates" in describe(RoundOpened(OPEN, 3))
    summary = RoundSummary(7, 6, 40, {"gradient_norm": 1.5})
    assert "made version 6, gradient_norm 1.5" in describe(RoundClosed(OPEN, summary, 6))
    assert "without quorum" in describe(RoundClosed(OPEN, summary, None))
    assert "release" in describe(RoundHeld(OPEN, "why"))


def test_metrics_are_served_on_the_loopback_interface() -> None:
    with serve_metrics(MetricsSettings(), lambda: SEEN) as port:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS
        ) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            body = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_SECONDS)
        with (
            pytest.raises(AggregatorError, match=r"metrics\.port"),
            serve_metrics(MetricsSettings(port), lambda: SEEN),
        ):
            pass
    assert body == format_metrics(SEEN)
    lines = body.splitlines()
    assert 'tessera_refused_total{reason="late"} 2' in lines
    assert "tessera_broker_losses_total 0" in lines
    assert 'tessera_round_updates_by_k{k="64"} 8' in lines
    assert all(line.startswith(("#", "tessera_")) for line in lines)


def test_figures_of_the_newest_evaluated_version() -> None:
    own = (0.1, 0.2, 0.2, 0.3, 0.3, 0.3, 0.4, 0.5, 0.6)
    fleet = Figure("global", "hr10", "", 40, 900.0, 1, 0.25, 0.0, 0.3, own)
    personal = Figure("personal", "hr10", "k=8", 4, 80.0, 0, math.nan, 0.0, math.nan)
    seen = only(evaluated=EvaluatedVersion(4, 7, (fleet, personal)))
    assert "version 4: hr10 0.25 (median 0.3, worst tenth 0.1, 40 devices)" in shown(seen)
    lines = format_metrics(seen).splitlines()
    for name, value in (("value", "0.25"), ("median", "0.3"), ("worst_tenth", "0.1")):
        labels = f'stage="global",metric="hr10",part="fleet",statistic="{name}"'
        assert f"tessera_evaluation{{{labels}}} {value}" in lines
    # What is not defined is no sample.
    assert not [line for line in lines if "nan" in line]
    assert 'tessera_evaluation_devices{stage="personal",metric="hr10",part="k=8"} 4' in lines
    assert "tessera_evaluated_version 4" in lines
    rests = replace(OPEN, threshold=0)
    assert "early stopping" in shown(only(current=rests, stopped=True))
    assert "early stopping" not in shown(only(current=rests))


def test_labels_and_numbers_are_what_prometheus_reads_back() -> None:
    """An artifact may be named with any printable characters, and be called fleet."""
    names = ('a"} 1 b="', "back\\slash", "fleet", "")
    figures = tuple(
        Figure("global", "hr10", name, 40, 900.0, 0, 0.1 * at, 0.0, math.nan)
        for at, name in enumerate(names, 1)
    )
    one = replace(FILMS, evaluated=EvaluatedVersion(4, 7, figures))
    seen = replace(SEEN, tasks=(one,), bytes_received=123_456_789_012)
    found = {}
    for line in format_metrics(seen).splitlines():
        if line.startswith("tessera_evaluation{"):
            pairs = re.fullmatch(
                r"tessera_evaluation\{((?:[^\"]+\"(?:[^\"\\]|\\.)*\")+)\} (.+)", line
            )
            assert pairs is not None, line
            labels = dict(re.findall(r"([a-z]+)=\"((?:[^\"\\]|\\.)*)\"", pairs[1]))
            part = re.sub(r"\\(.)", r"\1", labels["part"])
            assert part not in found, "a series twice: the scrape would be refused"
            found[part] = float(pairs[2])
    assert found == {
        'a"} 1 b="': 0.1,
        "back\\slash": 0.2,
        "artifact fleet": pytest.approx(0.3),
        "fleet": 0.4,
    }
    assert "tessera_received_bytes_total 123456789012" in format_metrics(seen).splitlines()
