"""Virtual devices of an experiment: their samples, and their learners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.fedavg.method import FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Method
from aggregator.methods.teacher_logits.method import TeacherLogitsMethod
from benchmarks.datasets.click import Clicks
from benchmarks.distill.artifacts import ArtifactShelf
from benchmarks.distill.experiment import Experiment
from benchmarks.distill.liars import LyingTeacher, random_claims
from benchmarks.distill.predictions import entries_of
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Learner
from device_sdk.methods.teacher_logits.learner import TeacherLogitsLearner
from device_sdk.trainer import Trainer

Samples = Mapping[str, NDArray[Any]]


class Fleet:
    """A method, its learners, and the trainers that predict for each device."""

    def __init__(self, method: Method, learners: list[Learner], trainers: list[Trainer]) -> None:
        self.method = method
        self.learners = learners
        self._trainers = trainers

    def predictor(self, device: int) -> Trainer:
        """The model that serves this device after the last round."""
        if isinstance(self.method, FedAvgMethod):
            # The devices' own copies were trained on; what serves is what all made together. They
            # take the global model again at the next round.
            self._trainers[0].set_parameters(self.method.model)
            return self._trainers[0]
        return self._trainers[min(device, len(self._trainers) - 1)]

    @property
    def switched(self) -> float:
        """Share of devices whose segmented optimizer takes plain steps by now."""
        states = [trainer.state.get("segmented.switched_at") for trainer in self._trainers]
        return float(np.mean([state is not None and int(state) > 0 for state in states]))


def whole(parts: list[Samples]) -> Samples:
    """All parts as one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def build_fleet(
    experiment: Experiment, clicks: Clicks, shelf: ArtifactShelf, seeds: np.random.SeedSequence
) -> Fleet:
    """The experiment's method and devices, all with the same first weights.

    ``pooled`` is one device that holds everybody's samples, without teachers.
    """
    parts = [device.train for device in clicks.devices]
    if experiment.method == "pooled":
        parts = [whole(parts)]
    teaching = experiment.method != "fedavg"
    trainers, learners = list[Trainer](), list[Learner]()
    for place, (part, child) in enumerate(zip(parts, seeds.spawn(len(parts)), strict=True)):
        trainer = shelf.trainer(experiment.model, experiment.seed, teaching=teaching)
        data = LocalData(entries_of(trainer, part))
        rng = np.random.default_rng(child)
        trainers.append(trainer)
        if place >= len(parts) - experiment.noisy:
            learners.append(LyingTeacher(random_claims(rng)))
        elif teaching:
            learners.append(TeacherLogitsLearner(lambda data=data: data, trainer, "", rng))  # type: ignore[misc]
        else:
            learners.append(FedAvgLearner(lambda data=data: data, trainer, "", rng))  # type: ignore[misc]
    return Fleet(_method(experiment, trainers[0]), learners, trainers)


def _method(experiment: Experiment, trainer: Trainer) -> Method:
    told = experiment.training
    if experiment.method == "fedavg":
        training = FedAvgTraining(
            epochs=told.epochs,
            batch_size=told.batch_size,
            most_steps=told.most_steps,
            proximal_mu=experiment.proximal_mu,
        )
        settings = FedAvgSettings(training=training, clip_multiple=0.0, samples_multiple=0.0)
        return FedAvgMethod(trainer.parameters, trainer.buffers, settings)
    if experiment.method == "pooled":
        told = replace(told, alpha=1.0, beta=0.0, divergence=False)
    if experiment.decay < 1:
        # A rate that falls has to be told: the artifact's own is one number.
        told = replace(told, learning_rate=experiment.model.learning_rate)
    return TeacherLogitsMethod(told, experiment.decay)
