"""One run over ML-100K's clicks, as data, and the settings that every run starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from aggregator.methods.fedavg import FedAvgSettings
from benchmarks.datasets.click import ClickSettings
from benchmarks.distill.experiment import ModelChoice
from benchmarks.harness import key_of
from benchmarks.robust.suite import SplitKind
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining

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
