"""One measured run, as data: what it does, what it found, and the key that it is stored under."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from aggregator.methods.prototypes import PrototypesSettings
from benchmarks.datasets.click import ClickSettings
from benchmarks.harness import key_of
from benchmarks.recommendation.click_metrics import ClickQuality
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining

OptimizerName = Literal["adam", "sgd", "segmented"]
_REVISION = 1
"""Raised when the same settings would give another result: stored ones then no longer count."""
_ATTENTION_REVISION = 2
"""The same, for what has the attention encoding alone: other results stay."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A click model's artifact: its network, encoding, and the optimizer in its graph.

    ``learning_rate`` is the optimizer's own (``mu3`` of the segmented one, whose other settings are
    ``window``, ``mu1``, ``sigma`` and ``xi``).
    """

    network: Literal["cnn", "wide_deep", "din", "deepfm"] = "cnn"
    attention: bool = False
    optimizer: OptimizerName = "adam"
    learning_rate: float = 1e-3
    dim: int = 8
    window: int = 2
    mu1: float = 0.99
    sigma: float = 0.9
    xi: float = 1e-4


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run over a few virtual devices.

    Attributes:
        seed: of first weights, of the samples' order, and of whatever else is drawn in the run; the
            data and their split have a seed of their own.
        method: ``teacher_logits`` exchanges mean outputs, ``fedavg`` models, ``prototypes`` mean
            embeddings, and ``pooled`` trains one model on everybody's samples.
        rounds: of all devices; the one with the least validation loss is reported.
        training: of ``teacher_logits`` and ``pooled``; its epochs, batch size and steps hold for
            ``fedavg`` too.
        proximal_mu: FedProx's, with ``fedavg``.
        present: the share of devices that take part in a round.
        noisy: so many devices, the last ones, send random distributions.
        decay: the learning rate falls by this factor a round (not with ``fedavg``; ``prototypes``
            has one among its settings).
        prototypes: settings of ``prototypes``, epochs and batch size included.
    """

    seed: int
    method: Literal["teacher_logits", "fedavg", "prototypes", "pooled"]
    model: ModelChoice
    rounds: int
    training: TeacherLogitsTraining
    proximal_mu: float = 0.0
    present: float = 1.0
    noisy: int = 0
    decay: float = 1.0
    data: ClickSettings = field(default_factory=ClickSettings)
    prototypes: PrototypesSettings | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1 or not 0 < self.present <= 1:
            raise ValueError("an experiment needs rounds, and devices present in them")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay}; expected above 0 and at most 1")
        if self.decay < 1 and self.method in ("fedavg", "prototypes"):
            raise ValueError(f"the rate of {self.method} does not fall by decay")
        if (self.method == "prototypes") != (self.prototypes is not None):
            raise ValueError("prototypes go with their own settings")
        if not 0 <= self.noisy < self.data.devices:
            raise ValueError("at least one device must be honest")

    @property
    def key(self) -> str:
        """Names the stored result: another setting, another key."""
        described = {"revision": _REVISION, **asdict(self)}
        if self.model.attention:
            described["attention_revision"] = _ATTENTION_REVISION
        if self.decay == 1:
            del described["decay"]  # so that results from before there was one still count
        if self.prototypes is None:
            del described["prototypes"]  # likewise
        return key_of(described)


GLOBAL = "global"
"""All devices' test samples together, each predicted by its own device's model."""


@dataclass(frozen=True, slots=True)
class Point:
    """After a round.

    ``validation_loss``: cross-entropy over all devices' validation samples. ``seconds``: processor
    time that training has taken a device so far, in the mean. ``quality``: on test samples, by
    device and ``GLOBAL``; empty where an earlier round was better on validation. ``switched``: the
    share of devices whose segmented optimizer takes plain steps by now.
    """

    round_id: int
    validation_loss: float
    seconds: float
    quality: dict[str, ClickQuality]
    switched: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The whole run, and the bytes of a round: a device's sealed update, and the broadcast."""

    curve: tuple[Point, ...]
    up_bytes: float
    down_bytes: float
    parameters: int

    @property
    def best(self) -> Point:
        """The round that validation picks; the first of equals."""
        return min(self.curve, key=lambda point: point.validation_loss)

    def seconds_to(self, loss: float) -> float | None:
        """Training time until the validation loss first was ``loss``, straight lines between
        rounds; None where it never was."""
        return self._until(loss, [point.seconds for point in self.curve])

    def rounds_to(self, loss: float) -> float | None:
        """As ``seconds_to``, in rounds: the same on a busy machine."""
        return self._until(loss, [float(point.round_id) for point in self.curve])

    def _until(self, loss: float, spent: list[float]) -> float | None:
        for place, point in enumerate(self.curve):
            if point.validation_loss <= loss:
                if place == 0:
                    return spent[0]
                before = self.curve[place - 1].validation_loss
                part = (before - loss) / (before - point.validation_loss)
                return spent[place - 1] + part * (spent[place] - spent[place - 1])
        return None
