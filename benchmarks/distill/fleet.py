"""The devices of a run over clicks: their artifacts, learners and liars, and what they predict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

import export
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Method
from aggregator.methods.prototypes import PrototypesMethod
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from benchmarks.channels import DistillChannel, require_sound
from benchmarks.datasets.click import ClickDevice, Clicks
from benchmarks.distill.experiment import GLOBAL, Experiment, ModelChoice, Outcome, Point
from benchmarks.harness import Artifacts
from benchmarks.recommendation.click_metrics import ClickQuality, click_quality
from benchmarks.simulation import Simulation
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.learner import Learner
from device_sdk.methods.local_steps import predict_all
from device_sdk.methods.prototypes.learner import PrototypesLearner
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining, encode_knowledge
from device_sdk.methods.teacher_logits.learner import TeacherLogitsLearner
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.arrays.tensors import Codec
from export.losses import cross_entropy
from export.models.click import (
    ClickDesign,
    click_model,
    click_recipe,
    example_clicks,
    predicted_clicks,
)
from export.models.fields import SampleFields

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
    told = experiment.prototypes
    width = None if told is None else told.training.width
    trainers, learners = list[Trainer](), list[Learner]()
    for place, (part, child) in enumerate(zip(parts, seeds.spawn(len(parts)), strict=True)):
        trainer = shelf.trainer(experiment.model, experiment.seed, teaching=teaching, width=width)
        data = LocalData(entries_of(trainer, part))
        rng = np.random.default_rng(child)
        trainers.append(trainer)
        if place >= len(parts) - experiment.noisy:
            learners.append(LyingTeacher(random_claims(rng)))
        elif told is not None:
            learners.append(PrototypesLearner(lambda data=data: data, trainer, "", rng))  # type: ignore[misc]
        elif teaching:
            learners.append(TeacherLogitsLearner(lambda data=data: data, trainer, "", rng))  # type: ignore[misc]
        else:
            learners.append(FedAvgLearner(lambda data=data: data, trainer, "", rng))  # type: ignore[misc]
    return Fleet(_method(experiment, trainers[0]), learners, trainers)


def _method(experiment: Experiment, trainer: Trainer) -> Method:
    told = experiment.training
    if experiment.prototypes is not None:
        return PrototypesMethod(
            experiment.prototypes, np.random.default_rng([experiment.seed, _SERVER_STREAM])
        )
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


# The server's first weights, whatever devices draw.
_SERVER_STREAM = 11
_TEACHING = ("teacher", "has_teacher", "weight_ce", "weight_teacher", "weight_kl", "l2")


def click_fields(sizes: tuple[tuple[str, int], ...]) -> SampleFields:
    """The fields of ``benchmarks.datasets.click``."""
    return SampleFields(
        categorical=sizes, multi_valued=(("genres", 18),), numeric=("year",), history="movie"
    )


class ArtifactShelf:
    """Artifacts of models with these fields, exported into ``folder``."""

    def __init__(self, folder: Path, fields: SampleFields) -> None:
        self._artifacts = Artifacts(folder)
        self._fields = fields

    def trainer(
        self, choice: ModelChoice, seed: int, *, teaching: bool, width: int | None = None
    ) -> Trainer:
        """A fresh trainer on one CPU thread.

        ``teaching``: with the distillation loss, or with that of prototypes of ``width``; else
        plain cross-entropy, for FedAvg.
        """
        export_it = (
            partial(self._export_teaching, choice=choice, seed=seed, width=width)
            if teaching
            else partial(self._export_plain, choice=choice, seed=seed)
        )
        described = [asdict(choice), asdict(self._fields), seed, teaching, width]
        folder = self._artifacts.path(described, export_it)
        return Trainer(folder, providers="cpu", threads=1)

    def _export_teaching(
        self, folder: Path, choice: ModelChoice, seed: int, width: int | None
    ) -> None:
        recipe = click_recipe(self._design(choice, width), seed=seed)
        # These graphs are verified by the exporter's tests.
        recipe.export(folder, optimizer=_optimizer(choice), verify=False)

    def _design(self, choice: ModelChoice, width: int | None = None) -> ClickDesign:
        return ClickDesign(choice.network, self._fields, choice.dim, choice.attention, width)

    def _export_plain(self, folder: Path, choice: ModelChoice, seed: int) -> None:
        design = self._design(choice)
        model = click_model(design, seed=seed)
        entries = example_clicks(design)
        batch = {name: value for name, value in entries.items() if name not in _TEACHING}
        dynamic = {name: {0: "batch"} for name in batch}
        if "history" in dynamic:
            dynamic["history"] = {0: "batch", 1: "past"}
        export.train_step(
            model,
            _labels_alone,
            batch,
            optimizer=_optimizer(choice),
            dynamic=dynamic,
            predict=predicted_clicks,
            directory=folder,
            verify=False,
        )


def _labels_alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch), batch["label"])


def _optimizer(choice: ModelChoice) -> export.Optimizer:
    if choice.optimizer == "adam":
        return export.Adam(lr=choice.learning_rate)
    if choice.optimizer == "sgd":
        return export.Sgd(lr=choice.learning_rate)
    return export.Segmented(
        lr=choice.learning_rate,
        window=choice.window,
        mu1=choice.mu1,
        sigma=choice.sigma,
        xi=choice.xi,
    )


Claims = Callable[[int], NDArray[np.float32]]
"""From the number of classes to mean outputs by label, [classes, classes]."""


class LyingTeacher(Learner):
    """Sends ``claims`` of every label in each round, and that it has as many samples as count."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`device_sdk.methods.learner.Learner`."""
        training = TeacherLogitsTraining.from_scalars(broadcast.settings)
        labels = np.arange(training.classes)
        claimed = np.full(training.classes, training.most_samples)
        knowledge = LabelKnowledge(labels, claimed, self._claims(training.classes))
        return Update(broadcast.round_id, encode_knowledge(knowledge, training))


def random_claims(rng: np.random.Generator) -> Claims:
    """Softmax of normal logits of deviation 3, drawn anew each time."""

    def claims(classes: int) -> NDArray[np.float32]:
        logits = 3 * rng.standard_normal((classes, classes))
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        return shares.astype(np.float32)

    return claims


def other_labels(classes: int) -> NDArray[np.float32]:
    """Certain of the next class in place of the label's own: of two, the opposite."""
    return np.roll(np.eye(classes, dtype=np.float32), 1, axis=1)


def last_class(classes: int) -> NDArray[np.float32]:
    """Certain of the last class whatever the label: of two, that all is clicked."""
    found = np.zeros((classes, classes), dtype=np.float32)
    found[:, -1] = 1
    return found


Predictions = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]
"""Of each sample: the label, the click's predicted probability, and the user."""


def entries_of(trainer: Trainer, samples: Samples) -> Samples:
    """Those entries that the trainer's artifact reads: only some networks want the history."""
    wanted = {port.of for port in trainer.artifact.graphs["train"].select("batch")}
    return {name: array for name, array in samples.items() if name in wanted}


def clicks_predicted(trainer: Trainer, samples: Samples) -> NDArray[np.float32]:
    """The probability of a click, [samples]."""
    return predict_all(trainer, entries_of(trainer, samples), "click", batch_size=512)


def predictions(trainer: Trainer, samples: Samples) -> Predictions:
    """Of one device's samples."""
    return samples["label"], clicks_predicted(trainer, samples), samples["categories"][:, 0]


def joined_quality(found: Sequence[Predictions]) -> ClickQuality:
    """Over all devices' samples together."""
    labels, clicks, users = (np.concatenate(part) for part in zip(*found, strict=True))
    return click_quality(labels, clicks, users)


_DEVICE_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def execute(
    experiment: Experiment,
    clicks: Clicks,
    shelf: ArtifactShelf,
    progress: Callable[[str], None],
) -> Outcome:
    """Train for ``experiment.rounds``; validate after each, and test the best so far.

    Args:
        clicks: the data that ``experiment.data`` names.
        shelf: exports what is missing.
        progress: called with one line of text after each round.
    """
    # One stream a purpose: changing one part of an experiment leaves the others' draws alone.
    order, fleets, coding = np.random.SeedSequence(experiment.seed).spawn(3)
    fleet = build_fleet(experiment, clicks, shelf, fleets)
    exact = experiment.method != "fedavg"
    channel = DistillChannel(Codec.FLOAT16, np.random.default_rng(coding), exact_broadcasts=exact)
    rng = np.random.default_rng(order)
    simulation = Simulation(fleet.method, fleet.learners, rng, channel)
    count = len(fleet.learners)
    honest = len(clicks.devices) - experiment.noisy
    present = max(1, round(experiment.present * count))
    curve: list[Point] = []
    seconds = 0.0
    for round_id in range(1, experiment.rounds + 1):
        chosen = sorted(rng.choice(count, present, replace=False).tolist())
        # Processor time: on a shared machine the wall clock measures the neighbours too.
        began = time.process_time()
        simulation.round(chosen)
        seconds += (time.process_time() - began) / count
        best = min((point.validation_loss for point in curve), default=math.inf)
        curve.append(_evaluate(round_id, seconds, fleet, clicks.devices[:honest], best))
        progress(
            f"round {round_id}/{experiment.rounds}, {seconds:.0f} s a device, validation loss "
            f"{curve[-1].validation_loss:.4f}, least {min(best, curve[-1].validation_loss):.4f}"
        )
    require_sound(simulation)
    sizes = fleet.predictor(0).parameters.values()
    return Outcome(
        curve=tuple(curve),
        up_bytes=channel.up_bytes,
        down_bytes=channel.down_bytes,
        parameters=sum(array.size for array in sizes),
    )


def _evaluate(
    round_id: int, seconds: float, fleet: Fleet, devices: Sequence[ClickDevice], best: float
) -> Point:
    """Test samples are looked at only where the round is better than ``best`` on validation."""
    losses = [
        click_quality(*predictions(fleet.predictor(place), device.validation)).loss
        for place, device in enumerate(devices)
    ]
    loss = float(np.average(losses, weights=[len(one.validation["label"]) for one in devices]))
    if not math.isfinite(loss):
        raise RuntimeError(f"the validation loss of round {round_id} is not finite")
    if loss >= best:
        return Point(round_id, loss, seconds, {}, fleet.switched)
    found = [predictions(fleet.predictor(place), one.test) for place, one in enumerate(devices)]
    quality = {_DEVICE_NAMES[place]: click_quality(*one) for place, one in enumerate(found)}
    quality[GLOBAL] = joined_quality(found)
    return Point(round_id, loss, seconds, quality, fleet.switched)
