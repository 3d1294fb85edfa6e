"""The devices of a run, the aggregator's half, and what their models are worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import export
from aggregator.methods.attention import AttentionMethod, AttentionSettings, MixtureSettings
from aggregator.methods.fedavg import FedAvgBinding, FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Method
from aggregator.methods.prototypes import PrototypesMethod, PrototypesSettings
from benchmarks.channels import HalfChannel, require_sound
from benchmarks.datasets.pfllib import DevicePictures, Pictures, load_fashion
from benchmarks.harness import Artifacts
from benchmarks.personalisation.experiment import BATCH, EVERY, Experiment, Judged, Outcome
from benchmarks.simulation import Simulation, device_name
from device_sdk import LocalData, Trainer
from device_sdk.artifact import load_artifact
from device_sdk.artifact.flat_layout import FlatLadder, layout_of
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.attention.learner import AttentionLearner
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Learner
from device_sdk.methods.local_steps import EachStep, Epochs, predict_all, train_epochs
from device_sdk.methods.prototypes.contract import PrototypesTraining
from device_sdk.methods.prototypes.learner import PrototypesLearner
from export.models.prototypes import EmbeddingClassifier, prototypes_recipe

_CLASSES, _EMBEDDING = 10, 64

Devices = Sequence[DevicePictures]


class Body(nn.Module):
    """PFLlib's network for these pictures at a quarter of its channels and an eighth of its hidden
    layer, without its head, and with strides in the place of pooling, which takes a third of the
    time: two 5 x 5 convolutions, [b, 1, 28, 28] to [b, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 5, stride=2)
        self.second = nn.Conv2d(8, 16, 5, stride=2)
        self.hidden = nn.Linear(256, _EMBEDDING)

    def forward(self, x: Tensor) -> Tensor:
        seen = functional.relu(self.second(functional.relu(self.first(x))))
        found: Tensor = self.hidden(seen.flatten(1))
        return found


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    _, logits = model(batch["x"])
    return functional.cross_entropy(logits, batch["label"]), {"logits": logits}


def _write(run: Experiment, folder: Path) -> None:
    torch.manual_seed(run.seed)
    network = EmbeddingClassifier(Body(), _EMBEDDING, _CLASSES)
    optimizer = export.Sgd(lr=0.05)
    if run.method == "prototypes":
        recipe = replace(prototypes_recipe("lenet", width=_EMBEDDING), model=network)
        recipe.export(folder, optimizer=optimizer, verify=False)
        return
    batch = {"x": torch.rand(BATCH, 1, 28, 28), "label": torch.arange(BATCH) % _CLASSES}
    export.train_step(
        network, _loss, batch, optimizer=optimizer, directory=folder, verify=False,
        dynamic={name: {0: "batch"} for name in batch},
    )  # fmt: skip


load = cache(load_fashion)


def execute(
    run: Experiment, root: Path, artifacts: Artifacts, progress: Callable[[str], None]
) -> Outcome:
    """Carry out a run. Raises RuntimeError where a device failed or an update was refused."""
    return trained(run, load(root), artifacts, progress)


def trained(
    run: Experiment, devices: Devices, artifacts: Artifacts, progress: Callable[[str], None]
) -> Outcome:
    """Carry out a run with these devices."""
    kind = "prototypes" if run.method == "prototypes" else "classifier"
    described = {"personalisation": kind, "seed": run.seed}
    folder = artifacts.path(described, lambda path: _write(run, path))
    trainers = [Trainer(folder, providers="cpu", seed=run.seed) for _ in devices]
    rngs = [np.random.default_rng([run.seed, device]) for device in range(len(devices))]
    data = [LocalData({"x": each.train.x, "label": each.train.label}) for each in devices]
    channel, simulation, method = HalfChannel(len(devices)), None, None
    if run.method != "alone":
        method = _method(run, folder, data)
        learners = [
            _learner(run, one, trainer, device_name(device), rngs[device])
            for device, (one, trainer) in enumerate(zip(data, trainers, strict=True))
        ]
        simulation = Simulation(method, learners, np.random.default_rng(run.seed), channel)
    found: dict[str, Judged] = {}
    seconds = 0.0
    for number in range(1, run.rounds + 1):
        began = time.process_time()
        if simulation is None:
            for one, trainer, rng in zip(data, trainers, rngs, strict=True):
                each = EachStep({"lr": run.learning_rate})
                train_epochs(trainer, one.train, Epochs(BATCH, 1), rng, each)
        else:
            simulation.round()
            require_sound(simulation)
        seconds += time.process_time() - began
        if number % EVERY and number != run.rounds:
            continue
        _judge(found, "own", number, devices, trainers)
        if run.method == "fine-tuned":
            assert isinstance(method, FedAvgMethod)
            shared = Trainer(folder, providers="cpu")
            shared.set_parameters(method.model)
            _judge(found, "shared", number, devices, [shared] * len(devices))
        progress(f"round {number}: validation {found['own'].curve[-1]:.4f}")
    turns = run.rounds * len(devices)
    return Outcome(
        found, channel.up_bytes / turns, channel.down_bytes / turns, 1000 * seconds / turns
    )


def _method(run: Experiment, folder: Path, data: Sequence[LocalData]) -> Method:
    rng = np.random.default_rng([run.seed, 11])
    if run.method == "prototypes":
        told = PrototypesTraining(
            _CLASSES, _EMBEDDING, epochs=1, batch_size=BATCH, learning_rate=run.learning_rate,
            pull=run.strength,
        )  # fmt: skip
        return PrototypesMethod(PrototypesSettings(told), rng)
    artifact = load_artifact(folder)
    if run.method == "attention":
        layout = layout_of(artifact.manifest)
        # Each takes as many steps as the mean device's epoch has.
        steps = round(sum(one.samples for one in data) / BATCH / len(data))
        mixing = AttentionTraining(
            base_steps=steps, batch_size=BATCH, learning_rate=run.learning_rate,
            aggregator_mixes=True,
        )  # fmt: skip
        mixture = MixtureSettings(rule="fedamp", amp_rate=2.0, amp_sigma=run.strength)
        first = layout.flatten(Trainer(folder, providers="cpu").parameters)
        settings = AttentionSettings(training=mixing, mixture=mixture)
        return AttentionMethod(first, FlatLadder.of([artifact.manifest]), settings)
    training = FedAvgTraining(batch_size=BATCH, learning_rate=run.learning_rate)
    training = replace(training, **_OWN[run.method](run.strength))
    binding = FedAvgBinding("fedavg", FedAvgSettings(training=training))
    return binding.build(0, rng, [artifact])


_OWN: Mapping[str, Callable[[float], dict[str, Any]]] = {
    "fine-tuned": lambda _: {},
    "fedper": lambda _: {"personal": "head"},
    "ditto": lambda pull: {"personalise": "ditto", "own_pull": pull},
    "ala": lambda rate: {"personalise": "ala", "mixed": "head", "mixing_rate": rate},
    "apfl": lambda share: {"personalise": "apfl", "own_share": share},
}


def _learner(
    run: Experiment, data: LocalData, trainer: Trainer, name: str, rng: np.random.Generator
) -> Learner:
    if run.method == "prototypes":
        return PrototypesLearner(lambda: data, trainer, name, rng)
    if run.method == "attention":
        return AttentionLearner(lambda: data, trainer, None, name, rng, "aggregator")
    return FedAvgLearner(lambda: data, trainer, name, rng)


def _judge(
    found: dict[str, Judged],
    model: str,
    number: int,
    devices: Devices,
    trainers: Sequence[Trainer],
) -> None:
    """Looks at the test pictures where validation is better than before."""
    validation, _ = _accuracy([each.validation for each in devices], trainers)
    known = found.get(model)
    curve = [*(known.curve if known else []), validation]
    if known is None or validation > known.validation:
        test, each = _accuracy([each.test for each in devices], trainers)
        known = Judged(number, validation, test, float(np.mean(each)), each)
    found[model] = replace(known, curve=curve)


def _accuracy(parts: Sequence[Pictures], trainers: Sequence[Trainer]) -> tuple[float, list[float]]:
    right: list[NDArray[np.bool_]] = []
    for part, trainer in zip(parts, trainers, strict=True):
        logits = predict_all(trainer, {"x": part.x}, "logits")
        right.append(logits.argmax(axis=1) == part.label)
    return float(np.concatenate(right).mean()), [float(each.mean()) for each in right]
