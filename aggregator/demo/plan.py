"""What a round is, and how fast each class of devices pretends to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from aggregator.demo.digits import EACH, Batch
from aggregator.demo.fleet import FleetTask
from aggregator.methods.method import Method
from aggregator.task.file import parse_task
from device_sdk import LocalData
from device_sdk.artifact.load import load_artifact, rung_folders
from device_sdk.capability.fit import Request, choose
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Learner, LearnerParts
from device_sdk.system.clock import Clock
from device_sdk.system.watch import Watch
from device_sdk.train.arrays import ArrayWork, WatchedTrainer
from device_sdk.train.job import LocalArtifact

CLASSES = ("sensor", "phone", "tablet", "desktop")
"""Of devices, the weakest first: each affords one rung more than the one before."""
LADDER = packaged_artifact().with_name("digits")
EPOCHS = 6
_TURNS, _TURN_SECONDS = 5, 0.2
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
    """By rung the p90 of a round's training on this machine, before anything is slowed down, as a
    device finds it that has this rung alone; the median of some times.

    The rungs take turns, so that a machine that gets slower in the meantime slows all of them.
    """
    broadcast = digits_method(rng).open_round(1)
    request = Request(60.0, time_box_seconds=_TURN_SECONDS)

    def work(rung: Path) -> ArrayWork:
        trainer = WatchedTrainer(rung, clock, seed=0, providers="cpu", watch=Watch())

        def learner() -> tuple[Learner, WatchedTrainer]:
            trainer.reset()
            parts = LearnerParts(lambda: LocalData(data), trainer, None, "0" * 32, rng)
            return FedAvgLearner.make(parts), trainer

        return ArrayWork(
            LocalArtifact(bytes(32), rung.name, rung), learner, broadcast, clock, rehearses=True
        )

    works = [work(folder) for folder in rungs().values()]
    taken = [
        [choose([work], request, clock).p90_seconds or 0.0 for work in works] for _ in range(_TURNS)
    ]
    return dict(zip(rungs(), np.median(taken, axis=0).tolist(), strict=True))


@dataclass(frozen=True)
class ClassPace:
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
    def of(cls, seconds: Mapping[str, float]) -> ClassPace:
        """Each class's limit lies midway between its rung and the next one, so that noise does not
        decide."""
        rising: Sequence[float] = np.maximum.accumulate([*seconds.values()]).tolist()
        limit = _ROOM * rising[-1]
        affordable = [
            *(float(np.sqrt(here * above)) for here, above in pairwise(rising)),
            limit,
        ]
        share = Request(1.0).limit_seconds
        slowdowns = (limit / each for each in affordable)
        return cls(seconds, limit / share, dict(zip(CLASSES, slowdowns, strict=True)))
