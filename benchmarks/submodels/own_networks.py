"""Fleets whose classes have networks of their own, each as wide as the class affords: what devices
exchange is what they see in classes, by the product's prototypes or mutual learning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import export
from aggregator.methods.method import Method
from aggregator.methods.mutual import MutualMethod, MutualSettings
from aggregator.methods.prototypes import PrototypesMethod, PrototypesSettings
from benchmarks.harness import Artifacts
from benchmarks.simulation import device_name
from benchmarks.submodels.experiment import SHARES, Experiment
from benchmarks.submodels.tasks import PICTURES_WIDTH, Dealt, Network, Samples, rows_of
from device_sdk import LocalData, Trainer
from device_sdk.methods.learner import Learner
from device_sdk.methods.mutual.contract import MutualTraining, sample_entries
from device_sdk.methods.mutual.learner import MutualLearner
from device_sdk.methods.prototypes.contract import PrototypesTraining
from device_sdk.methods.prototypes.learner import PrototypesLearner
from export.models.mutual import mutual_recipe
from export.models.prototypes import EmbeddingClassifier, prototypes_recipe

_CLASSES, _EMBEDDING = 10, 64
_PULL = 0.3
"""Of FedProto, as ``benchmarks.mutual`` chose it."""
_SHOWN = 0.1
"""Of a device's samples, to all: mutual learning's."""
_PUBLIC_BATCH = 32
"""Samples that are learnt from a step, of all owners together."""


def own_networks(
    run: Experiment, dealt: Dealt, artifacts: Artifacts, classes: NDArray[np.int64]
) -> tuple[Method, list[Learner], list[Trainer]]:
    """The aggregator's half, and each device's half and model."""
    folders = [
        artifacts.path(
            {"submodels": run.data, "fleet": run.fleet, "share": share, "seed": run.seed},
            lambda folder, share=share: _write(run, share, folder),  # type: ignore[misc]
        )
        for share in SHARES
    ]
    trainers = [Trainer(folders[place], providers="cpu", seed=run.seed) for place in classes]
    rngs = [np.random.default_rng([run.seed, device]) for device in range(run.devices)]
    learners: list[Learner] = []
    if run.fleet == "prototypes":
        told = PrototypesTraining(
            _CLASSES, _EMBEDDING, epochs=1000, batch_size=run.batch_size, most_steps=run.steps,
            learning_rate=run.learning_rate, pull=_PULL,
        )  # fmt: skip
        for device, (trainer, rng) in enumerate(zip(trainers, rngs, strict=True)):
            data = LocalData(dict(dealt.devices[device]))
            learners.append(
                PrototypesLearner(lambda data=data: data, trainer, device_name(device), rng)  # type: ignore[misc]
            )
        rng = np.random.default_rng([run.seed, 11])
        return PrototypesMethod(PrototypesSettings(told), rng), learners, trainers
    training = MutualTraining(
        _CLASSES, local_steps=run.steps, batch_size=run.batch_size,
        public_batch=max(1, _PUBLIC_BATCH // run.cohort), learning_rate=run.learning_rate,
        sample_form="deflate",
    )  # fmt: skip
    for device, (trainer, rng) in enumerate(zip(trainers, rngs, strict=True)):
        data = _shown(dealt.devices[device])
        learners.append(MutualLearner(lambda data=data: data, trainer, device_name(device), rng))  # type: ignore[misc]
    settings = MutualSettings(training, stale_rounds=run.rounds)
    return MutualMethod(sample_entries(trainers[0].artifact), settings), learners, trainers


def _shown(samples: Samples) -> LocalData:
    named = {"x": samples["x"], "y": samples["label"]}
    ends = round(_SHOWN * rows_of(samples))
    public = {name: array[:ends] for name, array in named.items()}
    return LocalData({name: array[ends:] for name, array in named.items()}, public)


def _write(run: Experiment, share: float, folder: Path) -> None:
    torch.manual_seed(run.seed)
    width = round(share * PICTURES_WIDTH)
    if run.fleet == "prototypes":
        network = EmbeddingClassifier(Network(width, _EMBEDDING), _EMBEDDING, _CLASSES)
        recipe = replace(prototypes_recipe("lenet", width=_EMBEDDING), model=network)
    else:
        recipe = replace(mutual_recipe("lenet"), model=Network(width))
    recipe.export(folder, optimizer=export.Sgd(lr=0.1), verify=False)
