"""Four unequal devices learn to predict clicks on MovieLens 1M and teach each other over MQTT.

    python -m examples.click_distillation
    python -m examples.click_distillation --rounds 3 --users 200     (a look in a minute)

The task offers three models. Each device times them and takes the largest that it can train
within a round; two of the four pretend to be slow. Models and samples stay where they are: a
round's update is a device's mean prediction for each label, 164 bytes once sealed (attentive
federated distillation, docs/methods/teacher_logits.md). At the end: a table, and a picture of the
rounds and of which fields look at which.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tabulate import tabulate

from aggregator.demo.fleet import FleetMember, FleetTask, LocalFleet, local_fleet
from aggregator.demo.work_clock import WorkClock, yardstick_seconds
from benchmarks.datasets.click import Clicks, ClickSettings, load_clicks
from benchmarks.recommendation.click_metrics import ClickQuality, click_quality
from device_sdk import Device, LocalData, Trainer, TrainingOptions
from device_sdk.errors import NothingLearnt
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining
from examples.program import carried_out, option_parser
from export.losses import example_teachers
from export.models.click import ClickDesign, click_recipe
from export.models.fields import SampleFields

_NAMES = ("anna", "bert", "carla", "dana")
_SLOWNESS = (0, 0, 1, 2)
"""Which of the models each device is slow enough for, counted from the largest."""
_BATCH, _STEPS = 64, 120
_TRAINING = TeacherLogitsTraining(
    classes=2,
    batch_size=_BATCH,
    most_steps=_STEPS,
    alpha=0.6,
    beta=0.2,
    l2=3e-4,
)
_OFFERED = (("wide_deep", 4, False), ("deepfm", 8, True), ("cnn", 16, True))
"""Network, width of embeddings, attention encoding; smallest first."""
_HEADROOM = 2.0
_WARM_UP_STEPS, _TIMED_STEPS = 10, 60

Samples = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Curve:
    """AUC on a device's validation samples after each round."""

    rounds: list[int]
    auc: list[float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fleet; 0 on success, 1 where a part failed or was stopped."""
    return carried_out("click_distillation", partial(_run, _parse(arguments)))


def _run(options: argparse.Namespace, console: Console) -> None:
    rounds: int = options.rounds
    out: Path = options.out
    clicks = load_clicks(
        options.data,
        ClickSettings(users=options.users, most_ratings=60, seed=options.seed, history=1),
    )
    fields = SampleFields(
        categorical=clicks.sizes, multi_valued=(("genres", 18),), numeric=("year",), history="movie"
    )
    with console.status("exporting three models, and timing a step of each here"):
        artifacts = _export(fields, out / "artifacts", options.seed)
    reference = yardstick_seconds()
    seconds = [
        _step_seconds(one, clicks.devices[0].train, WorkClock(reference)) for one in artifacts
    ]
    budget = _HEADROOM * _STEPS * seconds[-1]
    task = FleetTask(
        "teacher_logits",
        artifacts,
        rounds=rounds,
        settings={"training": _TRAINING.as_scalars()},
        train_seconds=budget,
        quorum=len(_NAMES) - 1,
        pause_seconds=0.3,
        broadcast_codec="float32",
    )
    members = [
        FleetMember(
            name,
            LocalData(_entries(device.train)),
            TrainingOptions(slowdown=_slowdown(slowness, seconds, budget / _steps(device.train))),
            WorkClock(reference),
        )
        for name, slowness, device in zip(_NAMES, _SLOWNESS, clicks.devices, strict=True)
    ]
    curves = {name: Curve([], []) for name in _NAMES}
    began = time.monotonic()
    shutil.rmtree(out / "fleet", ignore_errors=True)  # of the run before
    with local_fleet(task, members, out / "fleet") as fleet:
        print(f"broker at {fleet.broker.url}, four devices; a round may take {budget:.1f} s")
        for row in fleet.rounds():
            _follow(fleet, clicks, row.round, curves)
            sure = row.metrics.get("confidence", 0.0)
            shown = "  ".join(f"{name} {curve.auc[-1]:.3f}" for name, curve in curves.items())
            print(
                f"{time.monotonic() - began:5.0f} s  round {row.round:2}/{rounds}  "
                f"{row.participants} updates  mean confidence {sure:.3f}  AUC  {shown}"
            )
        fleet.settle()
        print("\n" + _table(fleet, clicks) + "\n")
        heat = _interactions(fleet, clicks)
    picture = out / "click_distillation.png"
    _draw(picture, curves, heat, fields.names)
    print(f"picture: {picture}")


def _export(fields: SampleFields, folder: Path, seed: int) -> list[Path]:
    folders = []
    for network, dim, attention in _OFFERED:
        recipe = click_recipe(ClickDesign(network, fields, dim, attention), seed=seed)
        # The exporter's tests compare these graphs with torch.
        made = recipe.export(folder / network, verify=False)
        folders.append(made.directory)
    return folders


def _step_seconds(folder: Path, train: Samples, clock: WorkClock) -> float:
    """Mean over some steps, of a model that is thrown away, by the clock that devices time by."""
    trainer = Trainer(folder, providers="cpu", threads=1)
    teachers = {name: tensor.numpy() for name, tensor in example_teachers(2).items()}
    batch = {**{n: a[:_BATCH] for n, a in _entries(train).items()}, **teachers}
    for _ in range(_WARM_UP_STEPS):
        trainer.step(batch)
    began = clock.now()
    for _ in range(_TIMED_STEPS):
        trainer.step(batch)
    return (clock.now() - began) / _TIMED_STEPS


def _steps(train: Samples) -> int:
    """Of a round."""
    return min(_STEPS, -(-len(train["label"]) // _BATCH))


def _slowdown(slowness: int, seconds: Sequence[float], step_budget: float) -> float:
    """So slow that of the models the one ``slowness`` below the largest still fits, no larger.

    ``seconds``: of a step of each model, smallest first, and what a step may take.
    """
    if slowness == 0:
        return 1.0
    fits, misses = seconds[-1 - slowness], seconds[-slowness]
    # Devices keep a fifth of the time in reserve.
    return max(1.0, 0.8 * step_budget / float(np.sqrt(fits * misses)))


def _entries(samples: Samples) -> Samples:
    """None of the offered models reads the history."""
    return {name: array for name, array in samples.items() if name != "history"}


def _follow(fleet: LocalFleet, clicks: Clicks, number: int, curves: Mapping[str, Curve]) -> None:
    for (name, device), own in zip(fleet.devices.items(), clicks.devices, strict=True):
        try:
            auc = _quality(device, own.validation).auc
        except NothingLearnt:  # too slow for its first round
            auc = math.nan
        curves[name].rounds.append(number)
        curves[name].auc.append(auc)


def _quality(device: Device, samples: Samples) -> ClickQuality:
    predicted = device.predict(_entries(samples))["click"]
    return click_quality(samples["label"], predicted, samples["categories"][:, 0])


def _table(fleet: LocalFleet, clicks: Clicks) -> str:
    lines = []
    sent = fleet.sent_bytes()
    for (name, device), own in zip(fleet.devices.items(), clicks.devices, strict=True):
        status = device.status()
        found = _quality(device, own.test)
        lines.append(
            (
                name,
                len(own.train["label"]),
                f"{status.slowdown:.1f} times",
                status.artifact,
                f"{status.train_seconds or 0:.2f} s",
                *(f"{one:.3f}" for one in (found.accuracy, found.auc, found.ndcg, found.mae)),
                f"{sent[name] / max(1, fleet.task.rounds):,.0f}",
            )
        )
    headers = ("device", "samples", "slower", "model", "a round", "ACC", "AUC", "NDCG@5", "MAE")
    return tabulate(lines, headers=(*headers, "bytes up"), disable_numparse=True)


def _interactions(fleet: LocalFleet, clicks: Clicks) -> tuple[str, NDArray[np.float32]] | None:
    """Whose, and [fields, fields]: of the first device whose model has the encoding."""
    for (name, device), own in zip(fleet.devices.items(), clicks.devices, strict=True):
        found = device.predict(_entries(own.test)).get("field_interactions")
        if found is not None:
            return f"{name}, {device.status().artifact}", found
    return None


def _draw(
    path: Path,
    curves: Mapping[str, Curve],
    heat: tuple[str, NDArray[np.float32]] | None,
    names: Sequence[str],
) -> None:
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for name, curve in curves.items():
        left.plot(curve.rounds, curve.auc, marker="o", markersize=3, label=name)
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set(xlabel="round", ylabel="AUC on validation samples", title="Each device's own model")
    left.legend()
    if heat is None:
        right.text(0.5, 0.5, "no device trains a model with attention", ha="center")
        right.set_axis_off()
    else:
        title, weights = heat
        image = right.imshow(weights, cmap="Blues")
        right.set_xticks(range(len(names)), names, rotation=45, ha="right")
        right.set_yticks(range(len(names)), names)
        right.set(title=f"How much a row's field\nlooks at a column's ({title})")
        figure.colorbar(image, ax=right, shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = option_parser("click_distillation", __doc__, rounds=12, holds="ml-1m/")
    parser.add_argument(
        "--users", type=int, default=800, help="users of all devices (default: 800)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.users < 8:
        parser.error("expected at least 8 users")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
