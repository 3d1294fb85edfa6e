"""What an operator, and Prometheus, get to see."""

from __future__ import annotations

import io
import math
import time
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from aggregator.errors import AggregatorError
from aggregator.evaluation import Figure
from aggregator.methods.method import RoundSummary
from aggregator.rounds.machine import RoundClosed, RoundHeld, RoundOpened
from aggregator.rounds.model_parts import ModelParts
from aggregator.serve.live import log_round, render
from aggregator.serve.metrics import Snapshot, TaskSnapshot, Told, registry_of, serve_metrics
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.store.rows import RoundRow
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


def scraped(seen: Snapshot) -> dict[str, float]:
    """What Prometheus reads, by name and labels in the order of theirs."""
    return samples_in(generate_latest(registry_of(Told(lambda: seen))).decode())


def samples_in(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = " ".join(
                [sample.name, *(f"{key}={sample.labels[key]}" for key in sorted(sample.labels))]
            )
            assert name not in found, "a series twice: the scrape would be refused"
            found[name] = sample.value
    return found


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
    assert scraped(unsealed)["tessera_round_held"] == 1
    assert "between two rounds" in shown(only(current=None))
    few = only(current=None, eligible=3, wait_for_devices=4)
    assert "no round opens: 3 of 4 devices" in shown(few)


def test_a_ladders_rungs_have_their_names() -> None:
    seen = only(widths={1: 4, 3: 8}, parts=ModelParts(rungs={1: "1of8", 2: "1of4", 3: "full"}))
    assert "1of8: 4, full: 8" in shown(seen)
    samples = scraped(seen)
    assert samples["tessera_round_updates_by_part part=1of8"] == 4
    assert samples["tessera_round_updates_by_part part=full"] == 8


def only(**changes: Any) -> Snapshot:
    """With one task, that of ``SEEN`` but for these changes."""
    return replace(SEEN, tasks=(replace(FILMS, **changes),))


def test_each_of_several_tasks_has_a_section_and_series_of_its_own() -> None:
    air = replace(FILMS, name="air", version=2, current=None, paused=True, widths={}, eligible=3)
    seen = replace(SEEN, tasks=(FILMS, air))
    text = shown(seen)
    for part in ("2 tasks", "films, version 5", "air, version 2, for 3 devices, paused", "600"):
        assert part in text
    samples = scraped(seen)
    assert samples["tessera_model_version task=films"] == 5
    assert samples["tessera_model_version task=air"] == 2
    assert samples["tessera_round_updates_by_part part=k=64 task=films"] == 8
    assert samples["tessera_devices"] == 48


def test_events_in_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    summary = RoundSummary(7, 6, 40, {"gradient_norm": 1.5})
    in_vain = [bytes([each]) * 16 for each in range(5)]
    log_round(RoundOpened(OPEN, 3))
    log_round(RoundClosed(OPEN, summary, 6))
    log_round(RoundClosed(OPEN, summary, None, in_vain=in_vain))
    log_round(RoundHeld(OPEN, "why"))
    opened, closed, vain, held = caplog.messages
    assert opened.endswith(", begins with 3 updates")
    assert closed.endswith("updates made version 6, gradient_norm 1.5")
    assert "without quorum" in vain
    assert vain.endswith("in vain for 040404040404, 030303030303, 020202020202 and 2 more")
    assert held.endswith("see tessera-aggregator release")


def test_metrics_are_served_on_the_loopback_interface() -> None:
    latest: list[Snapshot | None] = [None]
    with serve_metrics(MetricsSettings(), Told(lambda: latest[0])) as port:

        def scrape() -> dict[str, float]:
            url = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                return samples_in(answer.read().decode())

        assert scrape() == {}, "nothing was seen yet"
        latest[0] = SEEN
        samples = scrape()
        with (
            pytest.raises(AggregatorError, match=r"metrics\.port"),
            serve_metrics(MetricsSettings(port), Told(lambda: SEEN)),
        ):
            pass
    assert samples == scraped(SEEN)
    assert samples["tessera_refused_total reason=late"] == 2
    assert samples["tessera_broker_losses_total"] == 0
    assert samples["tessera_round_updates_by_part part=k=64"] == 8
    assert all(name.startswith("tessera_") for name in samples)


def test_figures_of_the_newest_evaluated_version() -> None:
    own = (0.1, 0.2, 0.2, 0.3, 0.3, 0.3, 0.4, 0.5, 0.6)
    fleet = Figure("global", "hr10", "", 40, 900.0, 1, 0.25, 0.0, 0.3, own)
    personal = Figure("personal", "hr10", "k=8", 4, 80.0, 0, math.nan, 0.0, math.nan)
    seen = only(evaluated=EvaluatedVersion(4, 7, (fleet, personal)))
    assert "version 4: hr10 0.25 (median 0.3, worst tenth 0.1, 40 devices)" in shown(seen)
    samples = scraped(seen)
    for name, value in (("value", 0.25), ("median", 0.3), ("worst_tenth", 0.1)):
        labels = f"metric=hr10 part=fleet stage=global statistic={name}"
        assert samples[f"tessera_evaluation {labels}"] == value
    # What is not defined is no sample.
    assert not any(math.isnan(value) for value in samples.values())
    assert samples["tessera_evaluation_devices metric=hr10 part=k=8 stage=personal"] == 4
    assert samples["tessera_evaluated_version"] == 4
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
    samples = scraped(replace(SEEN, tasks=(one,), bytes_received=123_456_789_012))
    for part, value in {
        'a"} 1 b="': 0.1,
        "back\\slash": 0.2,
        "artifact fleet": 0.1 * 3,
        "fleet": 0.4,
    }.items():
        labels = f"metric=hr10 part={part} stage=global statistic=value"
        assert samples[f"tessera_evaluation {labels}"] == value
    assert samples["tessera_received_bytes_total"] == 123_456_789_012
