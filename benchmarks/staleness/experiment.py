"""A run as data: a fleet of unequal speeds whose rounds end in one way; how it is carried out."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import export
from aggregator.simulate.devices import DeviceSettings
from aggregator.simulate.fleet import Failures, Speeds, VirtualFleet
from aggregator.simulate.task_rounds import PlayedRound, TaskSimulation
from aggregator.task.file import read_task
from benchmarks.datasets.vmnist import read_pictures
from benchmarks.harness import Artifacts, Row, default_data_folder
from device_sdk import LocalData, Trainer
from device_sdk.methods.local_steps import predict_all

DEVICES, SAMPLES = 100, 300
FACTOR = 30.0
"""The middle 95 % of the devices' round times lie within it."""
SPREAD = math.log(FACTOR) / (2 * 1.959964)
"""Standard deviation of the times' logarithm."""
MEDIAN_SECONDS = 60.0
AWAY = 0.1
SKEW = 0.3
STEPS, BATCH = 10, 32
SIZE = 14 * 14
_PER_LOOK = 100
"""Updates between two looks at how good the model is."""
_SMOOTHED, _LAST = 3, 5
"""Looks that a quality is the mean of: while it grows, and at the end."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A fleet of 100 devices that learns Fashion-MNIST, each with 300 pictures of a few classes.

    Attributes:
        wanted: updates at which a round closes; 0: when those that are likely to come have come.
        most_stale: with which updates of closed rounds count; 0: they are lost.
        learning_rate, server: of the devices' SGD, and of the aggregator's plain steps.
        updates: after so many that were counted the run ends.
    """

    seed: int
    wanted: int
    most_stale: int
    learning_rate: float
    server: float
    updates: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run, looked at after every hundred updates.

    Attributes:
        seconds: in virtual time, when each look was.
        validation, quality: accuracy at each look, on either half of the held-out pictures.
        counted, selected: by quarter of the fleet by speed, of all rounds.
        stale: updates that counted in a later round than their own.
        lost: updates that came too late to count.
    """

    seconds: tuple[float, ...]
    validation: tuple[float, ...]
    quality: tuple[float, ...]
    counted: Mapping[str, int]
    selected: Mapping[str, int]
    stale: int
    lost: int

    @property
    def final(self) -> float:
        """Accuracy at the end."""
        return float(np.mean(self.quality[-_LAST:]))

    @property
    def chosen_by(self) -> float:
        """The same on the half that settings are picked by."""
        return float(np.mean(self.validation[-_LAST:]))

    def seconds_to(self, quality: float) -> float:
        """When the accuracy first was so good, over some looks; infinite for never."""
        window = np.ones(_SMOOTHED) / _SMOOTHED
        smooth = np.convolve(self.quality, window, mode="valid")
        reached = np.flatnonzero(smooth >= quality)
        return self.seconds[reached[0] + _SMOOTHED - 1] if len(reached) else math.inf


class _Network(nn.Module):
    """One hidden layer: [b, 196] to [b, 10]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.hidden = nn.Linear(SIZE, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(functional.relu(self.hidden(x)))
        return found


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    return functional.cross_entropy(logits, batch["label"]), {"logits": logits}


def _write(seed: int, folder: Path) -> None:
    torch.manual_seed(seed)
    batch = {"x": torch.rand(BATCH, SIZE), "label": torch.arange(BATCH) % 10}
    export.train_step(
        _Network(),
        _loss,
        batch,
        optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        directory=folder,
        verify=False,
    )


@cache
def _pictures(part: Literal["train", "t10k"]) -> tuple[NDArray[Any], NDArray[Any]]:
    images, labels = read_pictures(default_data_folder() / "fashion-mnist", part)
    smaller = images.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4), dtype=np.float32)
    return smaller.reshape(-1, SIZE), labels


def pictures(devices: int, rng: np.random.Generator) -> Iterator[LocalData]:
    """Each device's, of classes in shares of a Dirichlet draw."""
    images, labels = _pictures("train")
    by_class = [np.flatnonzero(labels == label) for label in range(10)]
    for _ in range(devices):
        counts = rng.multinomial(SAMPLES, rng.dirichlet(np.full(10, SKEW)))
        rows = [rng.choice(own, size=n) for own, n in zip(by_class, counts, strict=True)]
        mine = np.concatenate(rows)
        yield LocalData({"x": images[mine], "label": labels[mine]})


def _task(run: Experiment, artifact: Path) -> str:
    close = f"wanted = {run.wanted}\nover_select = 1000.0" if run.wanted else ""
    late = f'late = "staleness"\nmost_stale = {run.most_stale}' if run.most_stale else ""
    hours = 100 * MEDIAN_SECONDS
    return f"""
[task]
name = "pictures"
method = "fedavg"
artifact = "{artifact}"
update_codec = "float16"
[round]
quorum = 1
deadline_seconds = {hours}
{close}
{late}
[fedavg]
optimizer = {{name = "plain", learning_rate = {run.server}}}
training = {{batch_size = {BATCH}, most_steps = {STEPS}, learning_rate = {run.learning_rate}}}
"""


def execute(
    run: Experiment, root: Path, artifacts: Artifacts, progress: Callable[[str], None]
) -> Outcome:
    """Rounds in virtual time until so many updates were counted."""
    artifact = artifacts.path(["staleness", run.seed], lambda folder: _write(run.seed, folder))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.toml"
        path.write_text(_task(run, artifact), encoding="utf-8")
        task = read_task(path)
    pace = MEDIAN_SECONDS * 1000 / SAMPLES
    fleet = VirtualFleet(
        DEVICES, run.seed, Speeds(spread=SPREAD), Failures(dropout=AWAY), pace_seconds=pace
    )
    settings = DeviceSettings(task, f"{__name__}:pictures", fleet)
    simulation = TaskSimulation(settings, settings.make())
    judge = _judge(artifact)
    seconds, looks = [0.0], [judge(simulation)]
    counted: Counter[str] = Counter()
    selected: Counter[str] = Counter()
    updates = looked = stale = lost = 0
    while updates < run.updates:
        played: PlayedRound = simulation.round()
        updates += played.counted + played.stale
        stale, lost = stale + played.stale, lost + played.late
        counted.update(played.counted_by)
        selected.update(played.selected_by)
        if updates >= looked + _PER_LOOK:
            looked = updates - updates % _PER_LOOK
            seconds.append(played.began_seconds + played.seconds)
            looks.append(judge(simulation))
            progress(f"{updates:,} updates, {seconds[-1] / 60:,.0f} min, {looks[-1][1]:.4f}")
    validation, quality = zip(*looks, strict=True)
    return Outcome(tuple(seconds), validation, quality, dict(counted), dict(selected), stale, lost)


def _judge(artifact: Path) -> Callable[[TaskSimulation], tuple[float, float]]:
    """Accuracy of a simulation's newest version on either half of the held-out pictures."""
    trainer = Trainer(artifact, providers="cpu", threads=1)
    images, labels = _pictures("t10k")

    def judge(simulation: TaskSimulation) -> tuple[float, float]:
        model = simulation.method.model_arrays
        assert model is not None
        trainer.set_parameters(model)
        found = predict_all(trainer, {"x": images}, "logits").argmax(axis=1)
        right = found == labels
        return float(right[::2].mean()), float(right[1::2].mean())

    return judge


# What is compared: rates by hand, the better of two on validation pictures of seed 0.

UPDATES = 3600
ALL = "all"


@dataclass(frozen=True, slots=True)
class Tuned(Row[Experiment]):
    """A row, and the devices' learning rates that are tried for it."""

    rates: tuple[float, ...] = ()

    def tried(self, seed: int) -> dict[float, Experiment]:
        """Its runs of a seed, by rate."""
        made = self.make(seed)
        return {rate: replace(made, learning_rate=rate) for rate in self.rates}


def _row(name: str, shows: str, wanted: int, most_stale: int, *rates: float) -> Tuned:
    tried = rates or (0.2, 0.4)

    def make(seed: int) -> Experiment:
        return Experiment(seed, wanted, most_stale, tried[0], 1.0, UPDATES)

    return Tuned(name, shows, make, rates=tried)


ROWS: tuple[Tuned, ...] = (
    _row(ALL, "a round waits for all who are likely to come", 0, 0),
    _row("first 70", "it closes at 70 updates; what comes later is lost", 70, 0),
    _row("first 30", "it closes at 30", 30, 0),
    _row("staleness, 30", "it closes at 30 of whatever age", 30, 100),
    _row("staleness, 10", "it closes at 10 of whatever age", 10, 100),
    _row("staleness, 10, 4 versions", "older ones than 4 versions are lost", 10, 4),
)
