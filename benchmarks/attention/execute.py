"""The devices of an experiment, and how it is carried out with the real learners and methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import precision_score
from torch import Tensor, nn

from aggregator.methods.attention import AttentionMethod, AttentionSettings
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Method, rate_at
from benchmarks.attention.experiment import Experiment, Local, Outcome, Point, Scores
from benchmarks.channels import HalfChannel, require_sound
from benchmarks.datasets.air import CLASSES, FEATURES, load_air, without_features
from benchmarks.datasets.pictures import PACS_CLASSES
from benchmarks.datasets.untouched import TURNS, UNTOUCHED
from benchmarks.datasets.vmnist import load_vmnist
from benchmarks.harness import Artifacts
from benchmarks.simulation import Simulation, device_name
from device_sdk.artifact import read_manifest
from device_sdk.artifact.flat_layout import FlatLadder
from device_sdk.local_data import LocalData
from device_sdk.methods.attention.learner import AttentionLearner
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Learner
from device_sdk.methods.local_steps import SampleStream, predict_all
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update
from export.build import Recipe
from export.ladder import submodels
from export.models.attention_meta import MetaDesign, attention_recipe, base_layout
from export.models.gru_classifier import (
    DYNAMIC,
    GruClassifier,
    classification,
    example_windows,
    predicted_classes,
)
from export.optimizers import Adam, Optimizer, Sgd


class DigitCnn(nn.Module):
    """[b, channels, side, side] float32 to [b, classes] logits: of digits 22,218 parameters.

    Two strided 5 x 5 convolutions of 8 and 16 channels and two linear layers: in the place of
    AlexNet (papers/fedamn, section 4.1), which takes two cores a day there.
    """

    def __init__(
        self, *, channels: int = 1, side: int = 28, classes: int = 10, seed: int = 0
    ) -> None:
        super().__init__()
        # What two convolutions leave of a side.
        left = ((side - 3) // 2 + 1 - 3) // 2 + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.features = nn.Sequential(
                nn.Conv2d(channels, 8, 5, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(8, 16, 5, stride=2, padding=1),
                nn.ReLU(),
            )
            self.classifier = nn.Sequential(
                nn.Linear(16 * left * left, 32), nn.ReLU(), nn.Linear(32, classes)
            )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


class RowsNet(nn.Module):
    """[b, features] float32 to [b, 10] logits, through 32 hidden units."""

    def __init__(self, features: int, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def example_samples(
    shape: tuple[int, ...], *, classes: int = 10, batch: int = 8, seed: int = 0
) -> dict[str, Tensor]:
    """Random ``x`` [b, *shape] and ``y`` int64 [b], to trace and verify with."""
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.rand(batch, *shape, generator=g),
        "y": torch.randint(classes, (batch,), generator=g),
    }


_HIDDEN = 32
_WIDE = 64
# The same stations lack the same features in each seed's runs of all methods.
_MISSING = 2


class Part(Protocol):
    """Samples and their classes."""

    @property
    def x(self) -> NDArray[np.float32]:
        """[n, ...]."""

    @property
    def y(self) -> NDArray[np.int64]:
        """[n]."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceData:
    """One device: its name, its three sets, its model's width."""

    name: str
    train: Part
    validation: Part
    test: Part
    width: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """Devices and their networks, the narrowest first; ``head`` is the last layer's module."""

    devices: tuple[DeviceData, ...]
    networks: tuple[nn.Module, ...]
    head: str

    @property
    def initial(self) -> NDArray[np.float32]:
        """The widest network's first parameters, float32 [p]."""
        return base_layout(self.networks[-1]).flatten(self.parameters(len(self.networks) - 1))

    def parameters(self, width: int) -> Mapping[str, NDArray[Any]]:
        """A network's first parameters by name."""
        return {n: p.detach().numpy() for n, p in self.networks[width].named_parameters()}


def fleet_of(data: str, seed: int, root: Path, only: Sequence[str] = ()) -> Fleet:
    """The fleet of an experiment; raises ValueError for unknown data or devices."""
    if data == "vmnist":
        devices = [
            DeviceData(d.name, d.train, d.validation, d.test)
            for d in load_vmnist(root, np.random.default_rng([seed, 1]))
        ]
        networks: list[nn.Module] = [DigitCnn(seed=seed)]
        head = "classifier.2"
    elif data in UNTOUCHED:
        devices = [
            DeviceData(d.name, d.train, d.validation, d.test)
            for d in UNTOUCHED[data](root, np.random.default_rng([seed, 1]))
        ]
        networks, head = [_untouched_network(data, seed)[0]], "classifier.2"
    elif data in ("air", "air-missing", "air-widths"):
        stations = load_air(root)
        if data == "air-missing":
            stations = without_features(stations, _MISSING, np.random.default_rng([seed, 1]))
        wide = data == "air-widths"
        devices = [
            DeviceData(s.name, s.train, s.validation, s.test, i % 2 if wide else 0)
            for i, s in enumerate(stations)
        ]
        sizes = (_HIDDEN, _WIDE) if wide else (_HIDDEN,)
        networks = [_gru(hidden, seed) for hidden in sizes]
        head = "head"
    else:
        raise ValueError(f"no fleet for {data!r}")
    unknown = set(only) - {device.name for device in devices}
    if unknown:
        raise ValueError(f"{data} has no device {sorted(unknown)[0]!r}")
    kept = tuple(device for device in devices if not only or device.name in only)
    return Fleet(kept, tuple(networks), head)


def export_artifacts(
    artifacts: Artifacts, data: str, width: int, key_scale: float, own_bias: float
) -> tuple[Path, Path]:
    """Folders of the base network's and the meta-network's artifacts, written when missing."""
    kind = data if data in UNTOUCHED else data.partition("-")[0]
    hidden = (_HIDDEN, _WIDE)[width]
    # Rounds tell the rate; on untouched fleets they leave it to the artifact.
    optimizer: Optimizer = Adam(lr=1e-3) if kind == "pacs" else Sgd(lr=0.1, momentum=0.9)
    network: nn.Module
    if kind == "vmnist":
        network, example = DigitCnn(), example_samples((1, 28, 28))
    elif kind in UNTOUCHED:
        network, example = _untouched_network(kind)
    else:
        network, example = _gru(hidden), example_windows(len(FEATURES))
    base = Recipe(
        network, classification, example, DYNAMIC, optimizer, predict=predicted_classes, name=kind
    )
    meta = attention_recipe(base, MetaDesign(key_scale=key_scale, own_bias=own_bias))

    def write(recipe: Recipe) -> Callable[[Path], object]:
        return lambda folder: recipe.export(folder, verify=False)

    def write_ladder(folder: Path) -> None:
        submodels(
            _gru, classification, example, widths=(_HIDDEN, _WIDE), optimizer=optimizer,
            dynamic=DYNAMIC, directory=folder, predict=predicted_classes, verify=False,
        )  # fmt: skip

    metas = artifacts.path([kind, width, "meta", key_scale, own_bias], write(meta))
    if data == "air-widths":
        return artifacts.path([kind, "ladder"], write_ladder) / f"width-{hidden}", metas
    return artifacts.path([kind, width], write(base)), metas


def _untouched_network(data: str, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """And a batch to trace it with."""
    if data == "pacs":
        network = DigitCnn(channels=3, side=32, classes=len(PACS_CLASSES), seed=seed)
        return network, example_samples((3, 32, 32), classes=len(PACS_CLASSES))
    features = 64 if data == "relabelled" else 14 * 14
    return RowsNet(features, seed=seed), example_samples((features,))


def _gru(hidden: int, seed: int = 0) -> nn.Module:
    return GruClassifier(len(FEATURES), hidden, CLASSES, seed=seed)


class _Timed(Learner):
    """A learner whose processor time is counted: other work on the machine does not matter."""

    def __init__(self, learner: AnyLearner) -> None:
        self.learner = learner
        self.seconds = 0.0

    def wants(self, broadcast: Broadcast) -> Sequence[str]:
        """The learner's."""
        began = time.thread_time()
        found = self.learner.wants(broadcast)
        self.seconds += time.thread_time() - began
        return found

    def train(self, broadcast: Broadcast) -> Update:
        """The learner's."""
        began = time.thread_time()
        update = self.learner.train(broadcast)
        self.seconds += time.thread_time() - began
        return update


def execute(
    experiment: Experiment, root: Path, artifacts: Artifacts, progress: Callable[[str], None]
) -> Outcome:
    """Train for the experiment's rounds, evaluating on the way.

    Args:
        root: the data sets' folder.
        artifacts: keep what is exported, for later runs.
        progress: called with one line of text after each evaluation.

    Raises RuntimeError where a device failed or an update was refused.
    """
    fleet = fleet_of(experiment.data, experiment.seed, root, experiment.devices)
    timed = [_Timed(learner) for learner in _learners(experiment, fleet, artifacts)]
    ladder = _ladder(experiment, fleet, artifacts)
    method = _method(experiment, fleet, ladder)
    channel = FallingRate(len(timed), experiment.decay)
    alone = experiment.method if isinstance(experiment.method, Local) else None
    simulation = None
    if method is not None:
        simulation = Simulation(method, timed, np.random.default_rng(0), channel)
    turns = _turns(
        len(timed), TURNS.get(experiment.data, 1), np.random.default_rng([experiment.seed, 3])
    )
    warm = experiment.method.training.warm_up_rounds if _mixes(experiment) else 0
    curve: list[Point] = []
    scores: list[Scores] = []
    by_device: dict[str, float] = {}
    at_warm = (0.0, 0, 0)
    for round_id in range(1, experiment.rounds + 1):
        participants = next(turns)
        if simulation is not None:
            simulation.round(participants)
            require_sound(simulation)
        elif alone is not None:
            told = channel.down(Broadcast(round_id, 0, {}, {"learning_rate": alone.learning_rate}))
            for index in participants:
                timed[index].train(told)
        seconds = sum(one.seconds for one in timed) / len(timed)
        if round_id == min(warm, experiment.rounds - 1):
            at_warm = (seconds, channel.down_bytes, channel.up_bytes)
        if round_id in (warm + 1, experiment.rounds):
            scores += _scores(round_id, [one.learner for one in timed])
        if round_id % experiment.every and round_id != experiment.rounds:
            continue
        models = _models(experiment, fleet, ladder, method, [one.learner for one in timed])
        point, each = _evaluate(models, fleet.devices, round_id, seconds)
        if not curve or point.validation > max(other.validation for other in curve):
            by_device = each
        curve.append(point)
        progress(f"round {round_id}/{experiment.rounds}, validation {point.validation:.4f}")
    after = (experiment.rounds - min(warm, experiment.rounds - 1)) * len(timed)
    spent = sum(one.seconds for one in timed) - at_warm[0] * len(timed)
    return Outcome(
        curve=curve,
        by_device=by_device,
        down_bytes=(channel.down_bytes - at_warm[1]) / after,
        up_bytes=(channel.up_bytes - at_warm[2]) / after,
        round_seconds=spent / after,
        scores=scores,
    )


def _turns(devices: int, rounds: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Who takes part, round by round: in each ``rounds`` of them every device once."""
    while True:
        for some in np.array_split(rng.permutation(devices), rounds):
            yield sorted(some.tolist())


def _mixes(experiment: Experiment) -> bool:
    method = experiment.method
    return isinstance(method, AttentionSettings) and method.training.mix


def _learners(experiment: Experiment, fleet: Fleet, artifacts: Artifacts) -> list[AnyLearner]:
    weak = round(experiment.weak * len(fleet.devices))
    found: list[AnyLearner] = []
    for index, device in enumerate(fleet.devices):
        base, meta = export_artifacts(
            artifacts, experiment.data, device.width, experiment.key_scale, experiment.own_bias
        )
        trainer = Trainer(base, providers="cpu")
        trainer.set_parameters(fleet.parameters(device.width))
        data = LocalData({"x": device.train.x, "y": device.train.y})
        rng = np.random.default_rng([experiment.seed, 2, index])
        name = device_name(index)
        if isinstance(experiment.method, Local):
            found.append(LocalLearner(data, trainer, experiment.method, rng))
        elif isinstance(experiment.method, FedAvgSettings):
            found.append(FedAvgLearner(lambda data=data: data, trainer, name, rng))
        else:
            apart = index < weak or experiment.method.training.aggregator_mixes
            found.append(
                AttentionLearner(
                    lambda data=data: data,
                    trainer,
                    None if apart else Trainer(meta, providers="cpu"),
                    name,
                    rng,
                    "aggregator" if apart else "device",
                )
            )
    return found


def _ladder(experiment: Experiment, fleet: Fleet, artifacts: Artifacts) -> FlatLadder:
    design = experiment.key_scale, experiment.own_bias
    rungs = [
        export_artifacts(artifacts, experiment.data, width, *design)[0]
        for width in range(len(fleet.networks))
    ]
    return FlatLadder.of([read_manifest(each) for each in rungs])


def _method(experiment: Experiment, fleet: Fleet, ladder: FlatLadder) -> Method | None:
    """None where devices share nothing."""
    if isinstance(experiment.method, Local):
        return None
    if isinstance(experiment.method, FedAvgSettings):
        return FedAvgMethod(dict(fleet.parameters(0)), {}, experiment.method)
    return AttentionMethod(fleet.initial, ladder, experiment.method)


def _models(
    experiment: Experiment,
    fleet: Fleet,
    ladder: FlatLadder,
    method: Method | None,
    learners: list[AnyLearner],
) -> list[Callable[[], Trainer]]:
    """For each device, what sets its trainer to the model that is to be evaluated."""
    if experiment.shows == "personal":
        return [lambda one=one: _own(one) for one in learners]
    if isinstance(method, AttentionMethod):
        shared = method.shared
        parts = [shared[ladder.places(ladder.layouts[d.width])] for d in fleet.devices]
        return [
            lambda one=one, part=part: one.show(part)
            for one, part in zip(learners, parts, strict=True)
        ]
    assert isinstance(method, FedAvgMethod)
    parameters = method.model
    return [lambda one=one: _set(one.trainer, parameters) for one in learners]


def _set(trainer: Trainer, parameters: Mapping[str, NDArray[np.float32]]) -> Trainer:
    """A shared model is set anew at the start of each round, so this disturbs nothing."""
    trainer.set_parameters(parameters)
    return trainer


def _own(learner: AnyLearner) -> Trainer:
    return learner.show() if isinstance(learner, AttentionLearner) else learner.trainer


def _evaluate(
    models: list[Callable[[], Trainer]],
    devices: Sequence[DeviceData],
    round_id: int,
    seconds: float,
) -> tuple[Point, dict[str, float]]:
    rows = []
    for model, device in zip(models, devices, strict=True):
        trainer = model()
        validation, _ = _quality(trainer, device.validation)
        rows.append((validation, *_quality(trainer, device.test)))
    means = np.mean(rows, axis=0)
    each = {device.name: float(row[1]) for device, row in zip(devices, rows, strict=True)}
    return Point(round_id, *(float(mean) for mean in means), seconds), each


def _quality(trainer: Trainer, part: Part) -> tuple[float, float]:
    """Accuracy and macro precision."""
    found = predict_all(trainer, {"x": part.x}, "logits", batch_size=512).argmax(axis=1)
    precision = precision_score(part.y, found, average="macro", zero_division=0)
    return float((found == part.y).mean()), float(precision)


def _scores(round_id: int, learners: list[AnyLearner]) -> list[Scores]:
    names = [device_name(index) for index in range(len(learners))]
    first, second = [], []
    for one in learners:
        found = one.scores if isinstance(one, AttentionLearner) else None
        if found is None or found.round_id != round_id:
            return []
        # Four digits are more than a picture shows.
        shares = found.first.mean(axis=0).astype(float).round(4).tolist()
        weights = dict(zip(found.neighbours, shares, strict=True))
        first.append([weights.get(name, 0.0) for name in names])
        second.append(round(float(found.second[:, 0].mean()), 4))
    return [Scores(round_id, first, second)]


class LocalLearner(Learner):
    """Takes a round's steps on its own samples and sends nothing."""

    def __init__(
        self, data: LocalData, trainer: Trainer, settings: Local, rng: np.random.Generator
    ) -> None:
        self.trainer = trainer
        self._settings = settings
        self._stream = SampleStream(data.train, settings.batch_size, rng)

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`~device_sdk.methods.learner.Learner`."""
        rate = float(broadcast.settings["learning_rate"])
        hyper = {"lr": rate} if rate else None
        for _ in range(self._settings.steps):
            self.trainer.step(self._stream.draw(), hyper=hyper)
        return Update(broadcast.round_id, {})


AnyLearner = AttentionLearner | FedAvgLearner | LocalLearner


class FallingRate(HalfChannel):
    """Broadcasts' ``learning_rate`` times decay^(round - 1) on their way to ``devices``.

    All methods fall alike, so that none is ahead because its last steps are quieter.
    """

    def __init__(self, devices: int, decay: float) -> None:
        super().__init__(devices)
        self._decay = decay

    def down(self, broadcast: Broadcast) -> Broadcast:
        """See :class:`HalfChannel`; at this round's rate."""
        rate = float(broadcast.settings["learning_rate"])
        settings = {"learning_rate": rate_at(rate, self._decay, broadcast.round_id)}
        return super().down(replace(broadcast, settings={**broadcast.settings, **settings}))
