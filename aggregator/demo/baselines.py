"""What the fleet is compared with: the same pictures, rounds and steps, and something left out."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.demo.digits import EACH, Batch, DealtDigits
from aggregator.demo.plan import CLASSES, EPOCHS, LADDER, digits_task, rungs
from aggregator.simulate.data import Entries
from aggregator.simulate.devices import DeviceSettings
from aggregator.simulate.fleet import CapabilityClass, Speeds, VirtualFleet
from aggregator.simulate.task_rounds import TaskSimulation
from aggregator.task.file import parse_task
from device_sdk import LocalData, Trainer
from device_sdk.artifact.submodels import part_of
from device_sdk.methods.local_steps import Epochs, predict_all, train_epochs


@dataclass(frozen=True)
class Reached:
    """Accuracy on the test pictures by class, and sealed bytes that a device sent, on average, for
    each class; 0 for one that sent nothing."""

    accuracy: Mapping[str, float]
    up_bytes: Mapping[str, float]

    @property
    def mean(self) -> float:
        """The classes are of one size."""
        return float(np.mean([*self.accuracy.values()]))


class Examiner:
    """Tests the parts of a full model that the classes hold."""

    def __init__(self, test: Batch) -> None:
        self._test = test
        self._trainers = {name: Trainer(folder, threads=1) for name, folder in rungs().items()}

    def accuracy(self, full: Mapping[str, NDArray[Any]], rung: str) -> float:
        """Of a rung's part of the full model."""
        trainer = self._trainers[rung]
        submodel = trainer.artifact.submodel
        assert submodel is not None
        shapes = {name: each.shape for name, each in trainer.parameters.items()}
        trainer.set_parameters(part_of(full, submodel, shapes))
        return right_share(trainer, self._test)

    def by_class(
        self, full: Mapping[str, NDArray[Any]], held: Mapping[str, str]
    ) -> dict[str, float]:
        """``held``: the rung of each class."""
        found = {rung: self.accuracy(full, rung) for rung in set(held.values())}
        return {name: found[rung] for name, rung in held.items()}


def right_share(trainer: Trainer, test: Batch) -> float:
    """How many of the test pictures it names, 0 to 1."""
    logits = predict_all(trainer, {"x": test["x"]}, "logits")
    return float((logits.argmax(axis=1) == test["y"]).mean())


@dataclass(frozen=True)
class _Brought(DeviceSettings):
    """``brought``: each device's samples."""

    brought: Entries = ()

    def entries(self) -> Entries:
        return self.brought


def together(
    train: Sequence[Batch], rung: str, rounds: int, seed: int
) -> tuple[Mapping[str, NDArray[Any]], float]:
    """A fleet that all trains one rung, by simulation: the full model, and bytes that each sent."""
    text = digits_task(rounds).to_toml("mqtt://127.0.0.1", len(train))
    settings = _Brought(
        parse_task(text, LADDER / "task.toml"),
        "digits",
        VirtualFleet(len(train), seed, Speeds((CapabilityClass(rung, artifact=rung),))),
        brought=[LocalData(each) for each in train],
    )
    simulation = TaskSimulation(settings, settings.make())
    sent = sum(played.up_bytes for played in simulation.rounds(rounds))
    full = simulation.method.model_arrays
    assert full is not None
    return full, sent / len(train)


def all_small(dealt: DealtDigits, held: Mapping[str, str], rounds: int, seed: int) -> Reached:
    """Everybody trains the smallest rung, and holds it."""
    smallest = next(iter(rungs()))
    full, sent = together(dealt.train, smallest, rounds, seed)
    found = Examiner(dealt.test).accuracy(full, smallest)
    return Reached(dict.fromkeys(held, found), dict.fromkeys(held, sent))


def only_strong(dealt: DealtDigits, held: Mapping[str, str], rounds: int, seed: int) -> Reached:
    """The strongest class trains the full model; the others are given what they can hold of it."""
    strong = dealt.train[len(CLASSES) - 1 :: len(CLASSES)]
    full, sent = together(strong, [*rungs()][-1], rounds, seed)
    return Reached(
        Examiner(dealt.test).by_class(full, held),
        {name: sent if name == CLASSES[-1] else 0.0 for name in held},
    )


def alone(dealt: DealtDigits, held: Mapping[str, str], rounds: int, seed: int) -> Reached:
    """Each device trains its class's rung by itself, as many steps as in all rounds."""
    found: dict[str, list[float]] = {name: [] for name in held}
    for place, train in enumerate(dealt.train):
        name = CLASSES[place % len(CLASSES)]
        trainer = Trainer(rungs()[held[name]], threads=1)
        rng = np.random.default_rng([seed, place, zlib.crc32(b"alone")])
        train_epochs(trainer, train, Epochs(EACH, rounds * EPOCHS), rng)
        found[name].append(right_share(trainer, dealt.test))
    return Reached(
        {name: float(np.mean(each)) for name, each in found.items()}, dict.fromkeys(held, 0.0)
    )
