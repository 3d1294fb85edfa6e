"""What a round is, and how fast each class of devices pretends to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from aggregator.methods.method import Method
from aggregator.task.file import parse_task
from device_sdk import LocalData, Trainer
from device_sdk.artifact.load import load_artifact, rung_folders
from device_sdk.capability.fit import Request
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import LearnerParts
from device_sdk.system.clock import Clock
from examples.digits.data import EACH, Batch
from examples.local_fleet import FleetTask

CLASSES = ("sensor", "phone", "tablet", "desktop")
"""Of devices, the weakest first: each affords one rung more than the one before."""
LADDER = packaged_artifact().with_name("digits")
EPOCHS = 10
_RUNS = 15
_ROOM = 1.3
"""The strongest class has so many times the time that the full model's round takes."""


def rungs() -> dict[str, Path]:
    """The ladder's artifacts by name, smallest first."""
    return {folder.name: folder for folder in rung_folders(LADDER)}


def digits_task(rounds: int, train_seconds: float | None = None) -> FleetTask:
    """Federated averaging; all devices make as many steps, each on all pictures of a device."""
    training = {"epochs": EPOCHS, "batch_size": EACH}
    return FleetTask(
        "fedavg",
        list(rungs().values()),
        rounds=rounds,
        settings={"training": training},
        # However busy this machine is, a round ends when everybody has answered.
        deadline_seconds=900.0,
        train_seconds=train_seconds,
        update_codec="int8",
    )


def digits_method(rng: np.random.Generator) -> Method:
    """The aggregator's half, at the ladder's first values."""
    task = parse_task(digits_task(1).to_toml("mqtt://127.0.0.1", 1), LADDER / "task.toml")
    return task.binding.build(0, rng, [load_artifact(each) for each in rungs().values()])


def round_seconds(data: Batch, clock: Clock, rng: np.random.Generator) -> dict[str, float]:
    """By rung the p90 of a round's training on this machine, before anything is slowed down.

    The rungs take turns, so that a machine that gets slower in the meantime slows all of them.
    """
    broadcast = digits_method(rng).open_round(1)
    trainers = {name: Trainer(folder, threads=1) for name, folder in rungs().items()}
    taken: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(_RUNS):
        for name, trainer in trainers.items():
            parts = LearnerParts(lambda: LocalData(data), trainer, None, "0" * 32, rng)
            learner = FedAvgLearner.make(parts)
            learner.rehearse(broadcast)
            start = clock.now()
            learner.rehearse(broadcast)
            taken[name].append(clock.now() - start)
    return {name: float(np.quantile(each, 0.9)) for name, each in taken.items()}


@dataclass(frozen=True)
class Pace:
    """``seconds``: what a round takes on this machine, by rung. ``train_seconds``: what it may take
    on a device. ``slowdowns``: by class."""

    seconds: Mapping[str, float]
    train_seconds: float
    slowdowns: Mapping[str, float]

    @property
    def limit_seconds(self) -> float:
        """What a rung has to fit into."""
        return Request(self.train_seconds).limit_seconds

    @classmethod
    def of(cls, seconds: Mapping[str, float]) -> Pace:
        """Each class's limit lies midway between its rung and the next one, so that noise does not
        decide: it is a third on either side."""
        rising: Sequence[float] = np.maximum.accumulate([*seconds.values()]).tolist()
        limit = _ROOM * rising[-1]
        affordable = [
            *(float(np.sqrt(here * above)) for here, above in pairwise(rising)),
            limit,
        ]
        share = Request(1.0).limit_seconds
        slowdowns = (limit / each for each in affordable)
        return cls(seconds, limit / share, dict(zip(CLASSES, slowdowns, strict=True)))
