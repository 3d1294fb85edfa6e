"""The devices of a run over clicks, honest and hostile, and the method that they serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from benchmarks.datasets.click import Clicks
from benchmarks.distill.fleet import (
    ArtifactShelf,
    Fleet,
    LyingTeacher,
    entries_of,
    last_class,
    other_labels,
    random_claims,
)
from benchmarks.robust.attacks import PROMOTING, STRENGTH, AnyValue, Attack, noise_like
from benchmarks.robust.clicks.catalogue import Catalogue
from benchmarks.robust.clicks.experiment import Experiment
from benchmarks.robust.suite import Trial
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Learner, State
from device_sdk.methods.teacher_logits.learner import TeacherLogitsLearner
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update

Samples = Mapping[str, NDArray[Any]]


class TrainerShelf:
    """A trainer a device, opened once for the runs that share models and seed."""

    def __init__(self, artifacts: ArtifactShelf) -> None:
        self._artifacts = artifacts
        self._held: tuple[object, list[Trainer]] | None = None

    def trainers(self, experiment: Experiment) -> list[Trainer]:
        """One for each device, as its artifact has it."""
        seed, models, teaching = experiment.seed, experiment.models, experiment.method == "logits"
        wanted = (seed, models, teaching, experiment.data.devices)
        if self._held is None or self._held[0] != wanted:
            opened = [
                self._artifacts.trainer(models[device % len(models)], seed, teaching=teaching)
                for device in range(experiment.data.devices)
            ]
            self._held = (wanted, opened)
        for trainer in self._held[1]:
            trainer.reset()
        return self._held[1]


def build_fleet(
    trial: Trial[Experiment],
    clicks: Clicks,
    catalogue: Catalogue,
    trainers: Sequence[Trainer],
    hostile: Sequence[int],
    item: int,
    seeds: tuple[np.random.SeedSequence, np.random.SeedSequence],
) -> Fleet:
    """The method, and a learner for each device.

    Args:
        trial: what is run.
        clicks: the devices' samples.
        catalogue: of ``clicks``.
        trainers: as new, one for each device.
        hostile: which devices carry out the trial's attack.
        item: the movie to promote.
        seeds: of the honest learners, and of the hostile devices.
    """
    experiment = trial.experiment
    honest, turned = (seed.spawn(len(trainers)) for seed in seeds)
    learners: list[Learner] = []
    for device, trainer in enumerate(trainers):
        rng, other = np.random.default_rng(honest[device]), np.random.default_rng(turned[device])
        attack = trial.attack if device in hostile else None
        samples = clicks.devices[device].train
        if experiment.method == "logits":
            learners.append(_teacher(trainer, samples, attack, rng, other))
            continue
        if attack in PROMOTING:
            samples = catalogue.promoting(samples, item)
        data = LocalData(entries_of(trainer, samples))
        learner = FedAvgLearner(lambda data=data: data, trainer, "", rng)  # type: ignore[misc]
        if attack is None:
            learners.append(learner)
        elif trial.magnitude:
            learners.append(AnyValue(learner, attack, trial.magnitude, other))
        else:
            learners.append(HostileLearner(learner, attack, other))
    settings = experiment.settings
    if isinstance(settings, FedAvgSettings):
        averaging = FedAvgMethod(trainers[0].parameters, trainers[0].buffers, settings)
        return Fleet(averaging, learners, list(trainers))
    return Fleet(TeacherLogitsMethod(settings), learners, list(trainers))


def _teacher(
    trainer: Trainer,
    samples: Samples,
    attack: Attack | None,
    rng: np.random.Generator,
    other: np.random.Generator,
) -> Learner:
    """Knowledge is by label: no item can be named, so promotion says that all is clicked."""
    if attack is None:
        data = LocalData(entries_of(trainer, samples))
        return TeacherLogitsLearner(lambda: data, trainer, "", rng)
    if attack == "flip":
        return LyingTeacher(other_labels)
    return LyingTeacher(random_claims(other) if attack == "noise" else last_class)


class HostileLearner(Learner):
    """Trains as an honest device would, and sends something else.

    ``flip`` sends ten times the opposite of the differences. ``noise`` sends normal noise of ten
    times the norm of each tensor. ``promotion`` sends ten times what it learnt, and ``patient``
    just that: their learner is given samples in which an item is always clicked.

    Args:
        learner: the device's real learner.
        attack: what is done to its updates.
        rng: draws the noise.
    """

    def __init__(self, learner: FedAvgLearner, attack: Attack, rng: np.random.Generator) -> None:
        self._learner = learner
        self._attack = attack
        self._rng = rng

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`device_sdk.methods.learner.Learner`."""
        update = self._learner.train(broadcast)
        if self._attack == "noise":
            sent = {name: noise_like(array, self._rng) for name, array in update.tensors.items()}
        else:
            factors = {"flip": -STRENGTH, "promotion": STRENGTH, "patient": np.float32(1)}
            factor = factors[self._attack]
            sent = {name: array * factor for name, array in update.tensors.items()}
        return replace(update, tensors=sent)

    def state(self) -> State:
        """That of the real learner."""
        return self._learner.state()

    def restore(self, state: State) -> None:
        """See :class:`device_sdk.methods.learner.Learner`."""
        self._learner.restore(state)
