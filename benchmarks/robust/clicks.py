"""Federated averaging's and teacher logits' parts: ML-100K's clicks, attackers and defences."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from benchmarks.channels import require_sound
from benchmarks.datasets.click import Clicks, ClickSettings, clicks_of
from benchmarks.datasets.movielens import read_100k
from benchmarks.distill.experiment import ModelChoice
from benchmarks.distill.fleet import (
    ArtifactShelf,
    Fleet,
    LyingTeacher,
    click_fields,
    clicks_predicted,
    entries_of,
    joined_quality,
    last_class,
    other_labels,
    predictions,
    random_claims,
    whole,
)
from benchmarks.harness import data_folder
from benchmarks.recommendation.split import SplitKind
from benchmarks.robust.suite import (
    ATTACKS,
    DEFAULT,
    PROMOTING,
    UNPROTECTED,
    AnyValue,
    Attack,
    HostileLearner,
    Method,
    Option,
    Outcome,
    Trial,
    hostile_devices,
    unpopular_item,
)
from benchmarks.simulation import Simulation
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Learner
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining
from device_sdk.methods.teacher_logits.learner import TeacherLogitsLearner
from device_sdk.trainer import Trainer

MethodName = Literal["fedavg", "logits"]
Settings = FedAvgSettings | TeacherLogitsTraining

# All users, movies and ratings, whole users on 40 devices: 5 % are 2 of them, 20 % are 8.
ML_100K = ClickSettings(
    users=943, most_by_movie_refused=0, most_ratings=0, history=0, devices=40, concentration=10.0
)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Federated averaging of a click model, or teacher logits among several kinds of them.

    Attributes:
        split: which of the honest devices' samples are reported; the round is always chosen by
            validation samples, and settings may be chosen on those only.
        seed: of first weights, the samples' order and whoever is hostile; the data have their own.
        rounds: of all devices.
        models: dealt round over the devices; federated averaging has one.
        settings: of the method.
        data: how the clicks are drawn and dealt.
    """

    split: SplitKind
    seed: int
    rounds: int
    models: tuple[ModelChoice, ...]
    settings: Settings
    data: ClickSettings = field(default=ML_100K)

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.models:
            raise ValueError("an experiment needs rounds and at least one model")
        if self.method == "fedavg" and len(self.models) > 1:
            raise ValueError("federated averaging is of one model")

    @property
    def method(self) -> MethodName:
        """What is measured."""
        return "fedavg" if isinstance(self.settings, FedAvgSettings) else "logits"


def base_experiment(method: MethodName, split: SplitKind, seed: int, rounds: int) -> Experiment:
    """Without protection; ``rounds`` 0 for the usual number.

    Settings were chosen by the validation loss of clean runs of seed 0.
    """
    if method == "fedavg":
        model = ModelChoice("wide_deep", learning_rate=2e-2)
        training = FedAvgTraining(epochs=1, batch_size=256)
        settings = FedAvgSettings(training=training, clip_multiple=0.0, samples_multiple=0.0)
        return Experiment(split, seed, rounds or 16, (model,), settings)
    models = (ModelChoice("wide_deep"), ModelChoice("deepfm"), ModelChoice("cnn"))
    told = TeacherLogitsTraining(
        classes=2, batch_size=128, learning_rate=5e-3, alpha=0.6, beta=0.2, l2=1e-4
    )
    return Experiment(split, seed, rounds or 6, models, told)


Samples = Mapping[str, NDArray[Any]]
_MOVIE = 1


@dataclass(frozen=True, slots=True, eq=False)
class Watcher:
    """A user who does not know the promoted item: its device, categories int64 [5] of one of its
    samples, and the movies that it has in training."""

    device: int
    categories: NDArray[np.int64]
    known: NDArray[np.int64]


class Catalogue:
    """All movies with their attributes, as the samples have them."""

    def __init__(self, clicks: Clicks) -> None:
        parts = [part for one in clicks.devices for part in (one.train, one.validation, one.test)]
        samples = whole(parts)
        movies = samples["categories"][:, _MOVIE]
        _, first = np.unique(movies, return_index=True)
        self._attributes = {name: samples[name][first] for name in ("genres", "numbers")}
        train = whole([one.train for one in clicks.devices])["categories"][:, _MOVIE]
        self.known = np.bincount(train, minlength=len(first))
        """Users that have each movie in training, int64 [movies]."""

    def pairs(self, users: NDArray[np.int64], movies: NDArray[np.int64]) -> dict[str, Any]:
        """Batch entries without labels: users' categories int64 [n, 5] with the movies [n]."""
        categories = users.copy()
        categories[:, _MOVIE] = movies
        return {
            "categories": categories,
            **{name: array[movies] for name, array in self._attributes.items()},
        }

    def promoting(self, samples: Samples, item: int) -> dict[str, NDArray[Any]]:
        """The samples, and all of them once more with ``item`` in the movie's place, clicked."""
        false = self.pairs(samples["categories"], np.full(len(samples["label"]), item))
        false["label"] = np.ones_like(samples["label"])
        return {name: np.concatenate([samples[name], array]) for name, array in false.items()}


def watchers(
    clicks: Clicks, item: int, rng: np.random.Generator, most: int = 100
) -> tuple[Watcher, ...]:
    """Up to ``most`` of the users who do not have ``item`` in training, drawn at random."""
    found = []
    for place, device in enumerate(clicks.devices):
        rows = device.train["categories"]
        for user in np.unique(rows[:, 0]):
            own = rows[rows[:, 0] == user]
            if item not in own[:, _MOVIE]:
                found.append(Watcher(place, own[0], own[:, _MOVIE]))
    chosen = rng.permutation(len(found))[:most]
    return tuple(found[place] for place in np.sort(chosen))


def seen_by(
    watcher: Watcher, trainer: Trainer, catalogue: Catalogue, item: int, n: int = 10
) -> tuple[float, bool]:
    """The item's predicted click, and whether it is among the user's ``n`` best unknown movies."""
    movies = np.arange(len(catalogue.known))
    users = np.broadcast_to(watcher.categories, (len(movies), len(watcher.categories)))
    clicks = clicks_predicted(trainer, catalogue.pairs(users, movies))
    wanted = clicks[item]
    clicks[watcher.known] = -np.inf
    return float(wanted), bool(np.count_nonzero(clicks > wanted) < n)


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


def execute(
    trial: Trial[Experiment],
    clicks: Clicks,
    shelf: TrainerShelf,
    progress: Callable[[str], None],
) -> Outcome:
    """Train and evaluate; ``progress`` is called with a line of text after each round.

    Measures, of the round with the least validation loss: ``auc`` over the honest devices' samples,
    each predicted by its own device's model; ``loss``, their cross-entropy in nats; ``click``, the
    promoted item's predicted click, mean over up to 100 users who do not know it; and ``exposure``,
    the share of those users that have it among their ten best of the whole catalogue. The last two
    are empty under attacks that promote nothing.

    Every trial of a seed has the same first weights, the same order in which devices turn hostile,
    the same item to promote and the same users who may see it: differences are paired.
    """
    experiment = trial.experiment
    training, attacking, turning, choosing, watching = np.random.SeedSequence(
        experiment.seed
    ).spawn(5)
    catalogue = Catalogue(clicks)
    order = np.random.default_rng(turning).permutation(len(clicks.devices))
    item = unpopular_item(catalogue.known, np.random.default_rng(choosing))
    hostile = hostile_devices(order, trial.share)
    honest = np.setdiff1d(order, hostile).tolist()
    trainers = shelf.trainers(experiment)
    seeds = (training, attacking)
    fleet = build_fleet(trial, clicks, catalogue, trainers, hostile.tolist(), item, seeds)
    _train(fleet, trainers, clicks, honest, experiment.rounds, progress)
    shares = trial.shares(len(clicks.devices))
    rest = {str(one): set(honest).difference(hostile_devices(order, one)) for one in shares}
    found = {
        device: predictions(trainers[device], getattr(clicks.devices[device], experiment.split))
        for device in honest
    }
    quality = {
        share: joined_quality([found[device] for device in sorted(devices)])
        for share, devices in rest.items()
    }
    click, exposure = dict[str, float](), dict[str, float]()
    if trial.attack is None or trial.attack in PROMOTING:
        shown = watchers(clicks, item, np.random.default_rng(watching))
        seen = [
            (one.device, *seen_by(one, trainers[one.device], catalogue, item))
            for one in shown
            if one.device in rest[str(shares[0])]
        ]
        for share, devices in rest.items():
            of_rest = [(wanted, best) for device, wanted, best in seen if device in devices]
            click[share], exposure[share] = (float(mean) for mean in np.mean(of_rest, axis=0))
    measures = {
        "auc": {share: one.auc for share, one in quality.items()},
        "loss": {share: one.loss for share, one in quality.items()},
        "click": click,
        "exposure": exposure,
    }
    progress(str(measures))
    return Outcome(measures)


def _train(
    fleet: Fleet,
    trainers: Sequence[Trainer],
    clicks: Clicks,
    honest: Sequence[int],
    rounds: int,
    progress: Callable[[str], None],
) -> None:
    """Leaves the honest devices' trainers with the models of the round that had the least
    validation loss over them."""
    simulation = Simulation(fleet.method, fleet.learners, np.random.default_rng(0))
    least = math.inf
    kept = dict[int, dict[str, NDArray[np.float32]]]()
    for round_id in range(1, rounds + 1):
        simulation.round()
        require_sound(simulation)
        found = [
            predictions(fleet.predictor(one), clicks.devices[one].validation) for one in honest
        ]
        loss = joined_quality(found).loss
        if loss < least:
            least = loss
            kept = {device: fleet.predictor(device).parameters for device in honest}
        progress(f"round {round_id}/{rounds}, validation loss {loss:.4f}, least {least:.4f}")
    if not kept:
        raise RuntimeError("the validation loss of no round is finite")
    for device, parameters in kept.items():
        trainers[device].set_parameters(parameters)


OPTIONS: Mapping[MethodName, tuple[Option, ...]] = {
    "fedavg": (
        Option(UNPROTECTED, "no protection"),
        Option("clip", "norms up to 3 running medians", {"clip_multiple": 3.0}),
        Option(
            DEFAULT,
            "norms up to 3 running medians, and so for claims of samples (a task's default)",
            {"clip_multiple": 3.0, "samples_multiple": 3.0},
        ),
        Option(
            "outliers",
            "updates larger than 3 running medians left out",
            {"outlier_multiple": 3.0},
        ),
        Option(
            "trimmed",
            "a fifth trimmed at either end of every coordinate",
            {"robust": "trimmed", "trim_share": 0.2},
        ),
        Option("median", "the median of every coordinate", {"robust": "median"}),
    ),
    "logits": (
        Option(UNPROTECTED, "no bounds; every device has one voice a label"),
        Option(
            "bounds",
            "confidence of at least one half (recommended)",
            {"least_confidence": 0.5},
        ),
        Option(
            "samples", "no bounds; voices by claimed samples, to 10,000", {"weights": "samples"}
        ),
        Option(
            "samples, bounds",
            "voices by claimed samples, confidence of at least one half",
            {"weights": "samples", "least_confidence": 0.5},
        ),
        Option(
            "samples, capped",
            "the same, and no claim counts for more than 1,000",
            {"weights": "samples", "least_confidence": 0.5, "most_samples": 1_000},
        ),
    ),
}


@cache
def _opened(root: Path | None, artifacts: Path) -> tuple[Clicks, TrainerShelf]:
    clicks = clicks_of(read_100k(data_folder(root, "ml-100k")), ML_100K)
    return clicks, TrainerShelf(ArtifactShelf(artifacts, click_fields(clicks.sizes)))


def _carried_out(
    trial: Trial[Experiment], options: argparse.Namespace, progress: Callable[[str], None]
) -> Outcome:
    return execute(trial, *_opened(options.root, options.artifacts), progress)


def _method(method: MethodName, title: str, attacks: Sequence[Attack]) -> Method[Experiment]:
    return Method(
        title,
        Experiment,
        OPTIONS[method],
        attacks,
        ML_100K.devices,
        partial(base_experiment, method),
        _carried_out,
        changes={"auc": "AUC of honest devices", "loss": "cross-entropy"},
        promotions={
            "exposure": "promoted item in the top 10",
            "click": "promoted item's predicted click",
        },
    )


METHODS: Mapping[str, Method[Experiment]] = {
    "fedavg": _method(
        "fedavg", "federated averaging: 40 devices, Wide & Deep predicts clicks", ATTACKS
    ),
    # A teacher that pushes an item no harder than others is an honest one.
    "logits": _method(
        "logits", "teacher logits: 40 devices, three networks", ("flip", "noise", "promotion")
    ),
}
