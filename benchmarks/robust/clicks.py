"""Federated averaging's and teacher logits' parts: ML-100K's clicks, attackers and defences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.teacher_logits import TeacherLogitsMethod
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
from benchmarks.harness import data_folder, key_of
from benchmarks.robust.attacks import (
    ATTACKS,
    PROMOTING,
    SHARES,
    STRENGTH,
    AnyValue,
    Attack,
    hostile_devices,
    noise_like,
    unpopular_item,
)
from benchmarks.robust.suite import (
    DEFAULT,
    UNPROTECTED,
    Found,
    Option,
    SplitKind,
    Suite,
    Trial,
    change_table,
    changed,
    promotion_table,
    single_table,
)
from benchmarks.simulation import Simulation
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Learner
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining
from device_sdk.methods.teacher_logits.learner import TeacherLogitsLearner
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update

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

    @property
    def key(self) -> str:
        """Changes with every setting."""
        described = asdict(self)
        # An option that came later keeps the keys of runs from before, where it is off.
        if described["settings"].get("samples_multiple") == 0:
            del described["settings"]["samples_multiple"]
        return key_of([self.method, described])


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """Keyed by the share of devices that are hostile; a clean run has all shares, and 0.

    Attributes:
        auc: over the honest devices' samples, each predicted by its own device's model.
        loss: their cross-entropy, in nats.
        click: the promoted item's predicted click, mean over up to 100 users who do not know it.
            Empty, as ``exposure`` is, under attacks that promote nothing.
        exposure: share of those users that have it among their ten best of the whole catalogue.
        best_round: the one with the least validation loss, which all of this is of.
        seconds: processor time of the rounds.
        by_round: AUC over the honest devices' validation samples after each round: what can be
            compared where a small difference has another round chosen.
    """

    auc: Mapping[str, float]
    loss: Mapping[str, float]
    click: Mapping[str, float]
    exposure: Mapping[str, float]
    best_round: int
    seconds: float
    by_round: tuple[float, ...] = ()


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


def execute(
    trial: Trial[Experiment],
    clicks: Clicks,
    shelf: TrainerShelf,
    progress: Callable[[str], None],
) -> Outcome:
    """Train and evaluate; ``progress`` is called with a line of text after each round.

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
    best_round, by_round, seconds = _train(
        fleet, trainers, clicks, honest, experiment.rounds, progress
    )
    clean = (0.0, 1 / len(clicks.devices), *SHARES)
    shares = clean if trial.attack is None else (trial.share,)
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
    auc = {share: one.auc for share, one in quality.items()}
    progress(f"AUC {auc}, click {click}, exposure {exposure}, round {best_round}, {seconds:.0f} s")
    loss = {share: one.loss for share, one in quality.items()}
    return Outcome(auc, loss, click, exposure, best_round, seconds, by_round)


def _train(
    fleet: Fleet,
    trainers: Sequence[Trainer],
    clicks: Clicks,
    honest: Sequence[int],
    rounds: int,
    progress: Callable[[str], None],
) -> tuple[int, tuple[float, ...], float]:
    """The round with the least validation loss over the honest devices, whose trainers hold its
    models in the end; the validation AUC after each round; the processor time of all rounds in
    seconds."""
    simulation = Simulation(fleet.method, fleet.learners, np.random.default_rng(0))
    least, best_round, seconds = math.inf, 0, 0.0
    kept = dict[int, dict[str, NDArray[np.float32]]]()
    by_round = []
    for round_id in range(1, rounds + 1):
        # Processor time: on a shared machine the wall clock measures the neighbours too.
        began = time.process_time()
        simulation.round()
        seconds += time.process_time() - began
        if simulation.failures:
            raise RuntimeError(f"devices failed or were refused: {simulation.failures}")
        found = [
            predictions(fleet.predictor(one), clicks.devices[one].validation) for one in honest
        ]
        quality = joined_quality(found)
        by_round.append(quality.auc)
        loss = quality.loss
        if loss < least:
            least, best_round = loss, round_id
            kept = {device: fleet.predictor(device).parameters for device in honest}
        progress(f"round {round_id}/{rounds}, validation loss {loss:.4f}, least {least:.4f}")
    if not kept:
        raise RuntimeError("the validation loss of no round is finite")
    for device, parameters in kept.items():
        trainers[device].set_parameters(parameters)
    return best_round, tuple(by_round), seconds


OPTIONS: Mapping[MethodName, tuple[Option, ...]] = {
    "fedavg": (
        Option(UNPROTECTED, "no protection", lambda base: base),
        Option("clip", "norms up to 3 running medians", changed(clip_multiple=3.0)),
        Option(
            DEFAULT,
            "norms up to 3 running medians, and so for claims of samples (a task's default)",
            changed(clip_multiple=3.0, samples_multiple=3.0),
        ),
        Option(
            "outliers",
            "updates larger than 3 running medians left out",
            changed(outlier_multiple=3.0),
        ),
        Option(
            "trimmed",
            "a fifth trimmed at either end of every coordinate",
            changed(robust="trimmed", trim_share=0.2),
        ),
        Option("median", "the median of every coordinate", changed(robust="median")),
    ),
    "logits": (
        Option(UNPROTECTED, "no bounds; every device has one voice a label", lambda base: base),
        Option(
            "bounds",
            "confidence of at least one half (recommended)",
            changed(least_confidence=0.5),
        ),
        Option(
            "samples", "no bounds; voices by claimed samples, to 10,000", changed(weights="samples")
        ),
        Option(
            "samples, bounds",
            "voices by claimed samples, confidence of at least one half",
            changed(weights="samples", least_confidence=0.5),
        ),
        Option(
            "samples, capped",
            "the same, and no claim counts for more than 1,000",
            changed(weights="samples", least_confidence=0.5, most_samples=1_000),
        ),
    ),
}
# A teacher that pushes an item no harder than others is an honest one.
_ATTACKS: Mapping[MethodName, tuple[Attack, ...]] = {
    "fedavg": ATTACKS,
    "logits": ("flip", "noise", "promotion"),
}


class ClickSuite(Suite[Experiment, Outcome]):
    """Loads the data once, when the first run needs them; exports artifacts into ``folder``.

    Args:
        method: which of the two.
        root: the data folder; None for the default one.
        folder: for artifacts.
    """

    outcome = Outcome

    def __init__(self, method: MethodName, root: Path | None, folder: Path) -> None:
        self.options = OPTIONS[method]
        self.attacks = _ATTACKS[method]
        self.devices = ML_100K.devices
        self._method = method
        self._root = root
        self._folder = folder
        self._loaded: tuple[Clicks, TrainerShelf] | None = None

    def experiment(self, split: SplitKind, seed: int, option: Option, rounds: int) -> Experiment:
        """ML-100K's clicks under ``option``."""
        base = base_experiment(self._method, split, seed, rounds)
        return replace(base, settings=option.change(base.settings))

    def run(self, trial: Trial[Experiment], progress: Callable[[str], None]) -> Outcome:
        """See :class:`Suite`."""
        if self._loaded is None:
            clicks = clicks_of(read_100k(data_folder(self._root, "ml-100k")), ML_100K)
            shelf = ArtifactShelf(self._folder, click_fields(clicks.sizes))
            self._loaded = (clicks, TrainerShelf(shelf))
        return execute(trial, *self._loaded, progress)

    def single_table(self, found: Found[Outcome]) -> str:
        """AUC."""
        share = 1 / self.devices
        return single_table(found, share, lambda one: one.auc, "AUC of the other devices")

    def tables(self, found: Found[Outcome], options: Sequence[str]) -> list[str]:
        """AUC, cross-entropy, and what is predicted of the promoted item."""
        rows, attacks = options, self.attacks
        return [
            change_table(found, rows, attacks, lambda one: one.auc, "AUC of honest devices"),
            change_table(found, rows, attacks, lambda one: one.loss, "cross-entropy"),
            promotion_table(
                found, rows, attacks, lambda one: one.exposure, "promoted item in the top 10"
            ),
            promotion_table(
                found, rows, attacks, lambda one: one.click, "promoted item's predicted click"
            ),
        ]
