"""Devices and aggregators of each method, as the experiment sets them up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

import export as exporter
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Method
from aggregator.methods.mutual import MutualMethod, MutualSettings
from aggregator.methods.prototypes import PrototypesMethod
from benchmarks.channels import MutualChannel, require_sound, sealed_bytes
from benchmarks.harness import Artifacts
from benchmarks.mutual.domains import Domain, everything, pacs64, rotated_mnist
from benchmarks.mutual.experiment import DeviceScore, Experiment, Outcome
from benchmarks.simulation import Simulation, device_name
from device_sdk import Trainer
from device_sdk.local_data import DataSource, LocalData
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Learner
from device_sdk.methods.local_steps import SampleStream, predict_all
from device_sdk.methods.mutual.contract import (
    MutualTraining,
    encode_samples,
    encode_soft_labels,
    sample_entries,
)
from device_sdk.methods.mutual.learner import MutualLearner
from device_sdk.methods.prototypes.learner import PrototypesLearner
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.arrays.tensors import Codec, encode_tensors
from export.build import Recipe
from export.models.images import SMALL_GREY, ImageShape, image_recipe
from export.models.mutual import mutual_recipe
from export.models.prototypes import prototypes_recipe

_PLAIN_NAMES = {"x": "x", "y": "y"}
# The server's first weights, whatever devices draw.
_SERVER_STREAM = 11


class Fleet(Protocol):
    """Four devices that learn round by round."""

    @property
    def trainers(self) -> Sequence[Trainer]:
        """Each device's model, as it would predict now."""

    @property
    def bytes_up(self) -> int:
        """Of all devices so far."""

    @property
    def bytes_down(self) -> int:
        """Of all devices so far."""

    def round(self) -> dict[str, float]:
        """One round; returns the method's metrics."""


def make_fleet(
    experiment: Experiment, domains: Sequence[Domain], artifacts: ArtifactShelf
) -> Fleet:
    """The fleet of an experiment, at its start."""
    first, fleet = np.random.SeedSequence(experiment.seed).spawn(2)
    # Devices of one architecture start from different weights, but for FedAvg.
    seeds = [int(child.generate_state(1)[0] >> 1) for child in first.spawn(len(domains))]
    if experiment.method == "fedavg":
        seeds = [seeds[0]] * len(domains)
    kind = _KINDS.get(experiment.method, "plain")
    trainers = [
        artifacts.trainer(experiment.data, model, kind, seed)
        for model, seed in zip(experiment.models, seeds, strict=True)
    ]
    if experiment.method in ("alone", "pooled"):
        return _Alone(experiment, domains, trainers, fleet)
    return _Together(experiment, domains, trainers, fleet)


class _Alone:
    """IND and AGG: no rounds, only steps; for AGG public samples travel once."""

    def __init__(
        self,
        experiment: Experiment,
        domains: Sequence[Domain],
        trainers: Sequence[Trainer],
        seeds: np.random.SeedSequence,
    ) -> None:
        self.trainers = trainers
        self.bytes_up = self.bytes_down = 0
        self._steps = experiment.steps
        self._hyper = {"lr": experiment.learning_rate} if experiment.learning_rate else None
        self._streams = []
        pooled = experiment.method == "pooled"
        if pooled:
            sizes = [_shared_bytes(domain) for domain in domains]
            self.bytes_up, self.bytes_down = sum(sizes), (len(sizes) - 1) * sum(sizes)
        for place, child in enumerate(seeds.spawn(len(domains))):
            parts = [domains[place].private, domains[place].public]
            if pooled:
                parts += [other.public for other in domains if other is not domains[place]]
            samples = {name: np.concatenate([one[name] for one in parts]) for name in ("x", "y")}
            self._streams.append(SampleStream(samples, 32, np.random.default_rng(child)))

    def round(self) -> dict[str, float]:
        losses = [
            trainer.step(stream.draw(), hyper=self._hyper)
            for trainer, stream in zip(self.trainers, self._streams, strict=True)
            for _ in range(self._steps)
        ]
        return {"local_loss": float(np.mean(losses))}


class _Together:
    """Methods with rounds: the real halves, through the wire's encodings."""

    def __init__(
        self,
        experiment: Experiment,
        domains: Sequence[Domain],
        trainers: Sequence[Trainer],
        seeds: np.random.SeedSequence,
    ) -> None:
        cohorts, coding, *devices = seeds.spawn(2 + len(domains))
        self._rng = np.random.default_rng(cohorts)
        self._present = experiment.present
        self._channel = MutualChannel(experiment.update_codec, np.random.default_rng(coding))
        self._own = list(trainers)
        learners: list[Learner] = []
        for place, child in enumerate(devices):
            rng = np.random.default_rng(child)
            name = device_name(place)
            if experiment.mutual is not None:
                data = LocalData(domains[place].private, domains[place].public)
                learner = MutualLearner(_always(data), trainers[place], name, rng)
                random = place == experiment.random_device
                learners.append(
                    _RandomLabels(learner, experiment.mutual, rng) if random else learner
                )
            elif experiment.prototypes is not None:
                labelled = _joined(domains[place], {"x": "x", "y": "label"})
                learners.append(PrototypesLearner(_always(labelled), trainers[place], name, rng))
            else:
                whole = _joined(domains[place])
                learners.append(FedAvgLearner(_always(whole), trainers[place], name, rng))
        self._global: FedAvgMethod | None = None
        method: Method
        if experiment.mutual is not None:
            settings = MutualSettings(experiment.mutual, stale_rounds=experiment.stale_rounds)
            method = MutualMethod(sample_entries(trainers[0].artifact), settings)
        elif experiment.prototypes is not None:
            method = PrototypesMethod(
                experiment.prototypes, np.random.default_rng([experiment.seed, _SERVER_STREAM])
            )
        else:
            if experiment.fedavg is None:
                raise ValueError("federated averaging needs its settings")
            start = trainers[0]
            self._global = method = FedAvgMethod(
                start.parameters,
                start.buffers,
                FedAvgSettings(training=experiment.fedavg, clip_multiple=0.0, samples_multiple=0.0),
            )
        self._simulation = Simulation(method, learners, self._rng, self._channel)

    @property
    def trainers(self) -> Sequence[Trainer]:
        if self._global is None:
            return self._own
        # What a device of federated averaging predicts with is what all made.
        self._own[0].set_parameters(self._global.model)
        return [self._own[0]] * len(self._own)

    @property
    def bytes_up(self) -> int:
        return self._channel.up_bytes

    @property
    def bytes_down(self) -> int:
        return self._channel.down_bytes

    def round(self) -> dict[str, float]:
        count = len(self._own)
        chosen = np.sort(self._rng.permutation(count)[: self._present])
        summary = self._simulation.round(int(device) for device in chosen)
        require_sound(self._simulation)
        return dict(summary.metrics)


class _RandomLabels(Learner):
    """A device that learns as the others do and says anything."""

    def __init__(
        self, learner: MutualLearner, training: MutualTraining, rng: np.random.Generator
    ) -> None:
        self._learner = learner
        self._training = training
        self._rng = rng

    def wants(self, broadcast: Broadcast) -> Sequence[str]:
        return self._learner.wants(broadcast)

    def train(self, broadcast: Broadcast) -> Update:
        """The learner's update with the softmax of normal logits (deviation 3) for labels."""
        update = self._learner.train(broadcast)
        tensors = dict(update.tensors)
        told = self._training
        for name in [name for name in tensors if name.split(".")[0] == "labels"]:
            logits = 3 * self._rng.standard_normal((len(tensors[name]), told.classes))
            wild = np.exp(logits - logits.max(axis=1, keepdims=True))
            probabilities = (wild / wild.sum(axis=1, keepdims=True)).astype(np.float32)
            coded = encode_soft_labels(probabilities, told.label_form, told.top_classes)
            tensors[name] = coded["labels"]
            if told.top_classes:
                tensors["classes"] = coded["classes"]
        return replace(update, tensors=tensors)


def _shared_bytes(domain: Domain) -> int:
    """Of a domain's public samples in their sealed form."""
    return sealed_bytes(len(encode_tensors(encode_samples(domain.public, "uint8"), Codec.FLOAT16)))


def _always(data: LocalData) -> DataSource:
    return lambda: data


def _joined(domain: Domain, names: Mapping[str, str] = _PLAIN_NAMES) -> LocalData:
    """All that a device may train on, each entry under the name that its method has for it."""
    parts = (domain.private, domain.public)
    return LocalData(
        {told: np.concatenate([one[name] for one in parts]) for name, told in names.items()}
    )


_SHAPES = {"rmnist": SMALL_GREY, "pacs64": ImageShape(3, 64, 7)}
# The paper's (section 4.1.1), decoupled from the gradient as in AdamW.
_LEARNING_RATE, _WEIGHT_DECAY = 1e-3, 1e-4

Kind = Literal["mutual", "plain", "prototypes"]
_KINDS: Mapping[str, Kind] = {"mutual": "mutual", "prototypes": "prototypes"}
_RECIPES: Mapping[Kind, Callable[..., Recipe]] = {
    "mutual": mutual_recipe,
    "plain": image_recipe,
    "prototypes": prototypes_recipe,
}


class ArtifactShelf:
    """Artifacts of image models, exported into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._artifacts = Artifacts(folder)

    def trainer(self, data: str, model: str, kind: Kind, seed: int) -> Trainer:
        """A trainer with first weights of that seed; exports the artifact where it is missing."""
        shape = _SHAPES[data]
        optimizer = exporter.AdamW(lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)

        def write(folder: Path) -> None:
            # Verified by the exporter's own tests, for each of these networks.
            _RECIPES[kind](model, shape).export(folder, optimizer=optimizer, verify=False)

        path = self._artifacts.path([data, model, kind], write)
        trainer = Trainer(path, providers="cpu", seed=seed)
        network = _RECIPES[kind](model, shape, seed=seed).model
        trainer.set_parameters(
            {name: tensor.detach().numpy() for name, tensor in network.named_parameters()}
        )
        return trainer


# Images and splits depend on the seed alone, not on the method.
_IMAGES_STREAM = 7


def load_domains(experiment: Experiment, root: Path) -> list[Domain]:
    """The experiment's samples."""
    rng = np.random.default_rng([experiment.seed, _IMAGES_STREAM])
    if experiment.data == "pacs64":
        return pacs64(root, experiment.share, rng)
    return rotated_mnist(root, experiment.share, experiment.split, rng)


def execute(
    experiment: Experiment,
    domains: list[Domain],
    artifacts: ArtifactShelf,
    progress: Callable[[str], None],
) -> Outcome:
    """Run the experiment's rounds; ``progress`` is called with one line of text after each."""
    began = time.process_time()
    fleet = make_fleet(experiment, domains, artifacts)
    board = Scoreboard(domains)
    conflicts: list[float] = []
    done = 0
    largest = 0.0
    for round_id in range(1, experiment.rounds + 1):
        before = fleet.bytes_up + fleet.bytes_down
        metrics = fleet.round()
        done = round_id
        if "conflict_share" in metrics:
            conflicts.append(metrics["conflict_share"])
        total = fleet.bytes_up + fleet.bytes_down
        largest = max(largest, total - before)
        last = round_id == experiment.rounds or (
            experiment.most_bytes > 0 and (total + largest) / len(domains) > experiment.most_bytes
        )
        if last or round_id % experiment.every == 0:
            board.look(round_id, fleet.trainers)
        best = max(board.curve, default=0.0)
        progress(f"round {round_id}/{experiment.rounds}, validation {best:.1f} %")
        if last:
            break
    return Outcome(
        devices=board.scores,
        curve=tuple(round(value, 3) for value in board.curve),
        rounds=done,
        bytes_up=fleet.bytes_up / len(domains),
        bytes_down=fleet.bytes_down / len(domains),
        conflict_share=float(np.mean(conflicts)) if conflicts else -1.0,
        seconds=time.process_time() - began,
    )


_OUTPUT = "probabilities"


class Scoreboard:
    """Keeps, for each device, the test scores of its best round by validation."""

    def __init__(self, domains: Sequence[Domain]) -> None:
        self._validation = everything(domains, "validation")
        self._test = everything(domains, "test")
        self._owner = np.repeat(np.arange(len(domains)), [len(one.test["y"]) for one in domains])
        self._best: dict[int, DeviceScore] = {}
        self.curve: list[float] = []

    def look(self, round_id: int, trainers: Sequence[Trainer]) -> None:
        """Score all devices' models; one trainer given several times is looked at once.

        Test samples are predicted where validation is at its best so far, and play no part in that.
        """
        seen: dict[int, tuple[float, NDArray[np.bool_] | None]] = {}
        found = []
        for device, trainer in enumerate(trainers):
            best = self._best.get(device)
            validation, right = seen.get(id(trainer), (-1.0, None))
            if validation < 0:
                validation = 100 * float(np.mean(_right(trainer, self._validation)))
            if best is None or validation > best.validation:
                if right is None:
                    right = _right(trainer, self._test)
                own = self._owner == device
                self._best[device] = DeviceScore(
                    round_id,
                    validation,
                    acc=100 * float(right.mean()),
                    bwt=100 * float(right[own].mean()),
                    fwt=100 * float(right[~own].mean()),
                )
            seen[id(trainer)] = (validation, right)
            found.append(validation)
        self.curve.append(float(np.mean(found)))

    @property
    def scores(self) -> tuple[DeviceScore, ...]:
        """By device."""
        return tuple(self._best[device] for device in sorted(self._best))


def _right(trainer: Trainer, samples: dict[str, NDArray[np.generic]]) -> NDArray[np.bool_]:
    predicted = predict_all(trainer, {"x": samples["x"]}, _OUTPUT).argmax(axis=1)
    right: NDArray[np.bool_] = predicted == samples["y"]
    return right
