"""Twelve air quality stations learn whom to learn from.

    python -m examples.air_quality
    python -m examples.air_quality --rounds 8 --stations 4     (a look in two minutes)

Each station of Beijing's network is a device with its own measurements, a thread of its own and a
connection to a real MQTT broker. A small GRU reads 48 hours and predicts the PM2.5 level (the five
of the Chinese standard) six hours ahead. Stations hand their networks to each other; a second,
tiny network on each device learns how much of whose to mix in before it trains on. Afterwards every
station is tested on a year that nobody trained on, beside a twin that trained as many steps alone
and beside the guess that nothing will change, and a picture shows who listened to whom.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# Official onnxruntime wheels write to the user's cache folder unless this is set before the import.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
from rich.console import Console
from rich.table import Table

from aggregator.demo.fleet import FleetMember, FleetTask, LocalFleet, local_fleet, round_bar
from benchmarks.datasets.air import CLASSES, FEATURES, SUBURBS, AirStation, load_air
from device_sdk import Device, LocalData, Trainer, TrainingOptions
from device_sdk.methods.attention.mixer import AttentionScores, scores_of
from device_sdk.methods.local_steps import SampleStream, predict_all
from device_sdk.system.command_line import positive_int
from examples.attention_picture import draw_attention
from examples.program import carried_out, how_often, option_parser
from export.models.attention_meta import attention_recipe
from export.models.gru_classifier import GruClassifier, gru_recipe

_HIDDEN = 32
_STEPS = 30
_BATCH = 32
_RATE = 0.1
_RATE_DECAY = 0.94
_WARM_UP = 3
_AHEAD_HOURS = 6
# Enough windows for a progress line; the table at the end counts all of them.
_GLANCE = 200


@dataclass(frozen=True)
class Result:
    """Test accuracy of one station in percent: its network, a twin that trained alone, and the
    guess that the level of the last measured hour stays."""

    together: float
    alone: float
    unchanged: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 on success, 1 where a step failed, 2 for a wrong command line."""
    arguments = _parser().parse_args(argv)
    return carried_out("air_quality", partial(_run, arguments))


def _run(arguments: argparse.Namespace, console: Console) -> None:
    out: Path = arguments.out
    with console.status("reading four years of measurements"):
        stations = _chosen(load_air(arguments.data, ahead_hours=_AHEAD_HOURS), arguments.stations)
    console.print(
        f"{len(stations)} stations, about {len(stations[0].train.y):,} windows each to train on"
    )
    base, meta = _export(out, console)
    weak = {station.name for station in stations[: arguments.weak]}
    members = [
        FleetMember(
            station.name,
            LocalData({"x": station.train.x, "y": station.train.y}),
            TrainingOptions(
                artifact="gru32", placement="aggregator" if station.name in weak else "device"
            ),
        )
        for station in stations
    ]
    shutil.rmtree(out / "fleet", ignore_errors=True)  # of the run before
    with local_fleet(_task(base, meta, arguments.rounds), members, out / "fleet") as fleet:
        early = _follow(fleet, stations, console)
        fleet.settle()
        late = _listening(fleet)
        sent = fleet.sent_bytes()
        senders = {name: device.device_id for name, device in fleet.devices.items()}
        results = {
            station.name: _result(fleet.devices[station.name], station, base, arguments.rounds)
            for station in stations
        }
    console.print(_table(results, late, senders, sent))
    gained = np.mean([one.together - one.alone for one in results.values()])
    console.print(f"Together the stations are right {how_often(gained)} than alone.")
    if late:
        groups = {name: "suburbs" if name in SUBURBS else "city" for name in senders}
        picture = draw_attention(out / "air_quality.png", [early, late], senders, groups)
        console.print(f"picture: {picture}", highlight=False)


def _chosen(stations: list[AirStation], count: int) -> list[AirStation]:
    """All, or so many of them, city and suburbs by turns."""
    if count < 2:
        raise ValueError("one station has nobody to listen to; expected --stations 2 or more")
    suburbs = [station for station in stations if station.name in SUBURBS]
    city = [station for station in stations if station.name not in SUBURBS]
    turns = [station for pair in zip(city, suburbs, strict=False) for station in pair]
    return [*turns, *city[len(suburbs) :]][:count]


def _export(out: Path, console: Console) -> tuple[Path, Path]:
    """The base network's and the meta-network's artifacts, exported where they are missing."""
    base, meta = out / "artifacts" / "gru32", out / "artifacts" / "gru32-attention"
    recipe = gru_recipe(GruClassifier(len(FEATURES), _HIDDEN, CLASSES))
    if not (base / "manifest.json").exists():
        with console.status("exporting the GRU: forward, loss, gradients, optimizer"):
            recipe.export(base, verify=False)
    if not (meta / "manifest.json").exists():
        with console.status("exporting the attention over its parameters"):
            attention_recipe(recipe).export(meta, verify=False)
    return base, meta


def _task(base: Path, meta: Path, rounds: int) -> FleetTask:
    return FleetTask(
        "attention",
        [base],
        rounds=rounds,
        companions=[meta],
        settings={
            "rate_decay": _RATE_DECAY,
            "training": {
                "aggregator_mixes": False,
                "warm_up_rounds": _WARM_UP,
                "base_steps": _STEPS,
                "batch_size": _BATCH,
                "learning_rate": _RATE,
                "meta_every": 10,
            },
        },
        deadline_seconds=600.0,
    )


def _follow(
    fleet: LocalFleet, stations: Sequence[AirStation], console: Console
) -> dict[str, AttentionScores]:
    """Progress; returns whom the devices listened to when they first did."""
    early: dict[str, AttentionScores] = {}
    with round_bar(console, fleet.task.rounds, "stations enrol and train") as show:
        for row in fleet.rounds():
            if row.round > _WARM_UP and len(early) < len(fleet.devices):
                early = {**_listening(fleet), **early}
            right = np.mean([_glance(fleet.devices[one.name], one) for one in stations])
            said = "warming up" if row.round <= _WARM_UP else "mixing"
            show(row.round, f"{said}, loss {row.metrics['loss']:.2f}, about {right:.0f} % right")
    return early


def _listening(fleet: LocalFleet) -> dict[str, AttentionScores]:
    found = {name: scores_of(device.learner_state()) for name, device in fleet.devices.items()}
    return {name: scores for name, scores in found.items() if scores is not None}


def _glance(device: Device, station: AirStation) -> float:
    rows = np.linspace(0, len(station.validation.y) - 1, _GLANCE).astype(np.int64)
    found = device.predict({"x": station.validation.x[rows]})["logits"].argmax(axis=1)
    return 100 * float((found == station.validation.y[rows]).mean())


def _result(device: Device, station: AirStation, base: Path, rounds: int) -> Result:
    test = station.test
    together = device.predict({"x": test.x})["logits"].argmax(axis=1)
    twin = Trainer(base, providers="cpu")
    samples = {"x": station.train.x, "y": station.train.y}
    stream = SampleStream(samples, _BATCH, np.random.default_rng(0))
    for step in range(rounds * _STEPS):
        rate = _RATE * _RATE_DECAY ** (step // _STEPS)
        twin.step(stream.draw(), hyper={"lr": rate})
    alone = predict_all(twin, {"x": test.x}, "logits").argmax(axis=1)
    return Result(
        *(100 * float((guess == test.y).mean()) for guess in (together, alone, test.last_level))
    )


def _table(
    results: Mapping[str, Result],
    late: Mapping[str, AttentionScores],
    senders: Mapping[str, str],
    sent: Mapping[str, int],
) -> Table:
    table = Table(title="Right predictions in percent, over a year that nobody trained on")
    table.add_column("station")
    for name in ("together", "alone", "unchanged"):
        table.add_column(name, justify="right")
    table.add_column("listens most to")
    table.add_column("sent", justify="right")
    names = {sender: name for name, sender in senders.items()}
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.together:.1f}",
            f"{result.alone:.1f}",
            f"{result.unchanged:.1f}",
            _favourite(late.get(name), names),
            f"{sent[name] / 1000:,.0f} kB",
        )
    means = [np.mean([getattr(one, key) for one in results.values()]) for key in _COLUMNS]
    table.add_section()
    table.add_row("mean", *(f"{mean:.1f}" for mean in means), "", "")
    return table


_COLUMNS = ("together", "alone", "unchanged")


def _favourite(scores: AttentionScores | None, names: Mapping[str, str]) -> str:
    if scores is None or not scores.neighbours:
        return "(mixed by the aggregator)"
    weights = scores.first.mean(axis=0)
    best = int(weights.argmax())
    return f"{names.get(scores.neighbours[best], '?')} ({weights[best]:.0%})"


def _parser() -> argparse.ArgumentParser:
    parser = option_parser("air_quality", __doc__, rounds=40, holds="beijing-air/")
    parser.add_argument("--stations", type=positive_int, default=12, help="default: all 12")
    parser.add_argument(
        "--weak",
        type=int,
        default=1,
        help="so many stations leave mixing to the aggregator (default: 1)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
