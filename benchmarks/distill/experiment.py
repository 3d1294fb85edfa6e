"""A run as data; and the rows, whose settings were chosen on validation samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from aggregator.methods.prototypes import PrototypesSettings
from benchmarks.datasets.click import ClickSettings
from benchmarks.harness import Row
from benchmarks.recommendation.click_metrics import ClickQuality
from device_sdk.methods.prototypes.contract import PrototypesTraining
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining

OptimizerName = Literal["adam", "sgd", "segmented"]


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


BASELINE = "FD"
AFD = "AFD"

_ROUNDS = 12
_ADAM = ModelChoice(optimizer="adam", learning_rate=1e-3)
# xi = 0, no switch: at the rates that are fast, the plain steps it turns into are far too long for
# this task (docs/methods/teacher_logits.md).
_SEGMENTED = replace(_ADAM, optimizer="segmented", learning_rate=7e-3, window=1, mu1=0.999, xi=0.0)
_PLAIN = TeacherLogitsTraining(
    classes=2, epochs=1, batch_size=128, alpha=0.6, beta=0.4, divergence=False
)
_JOINT = replace(_PLAIN, alpha=0.6, beta=0.2, divergence=True, l2=1e-4)
_BOUNDED = replace(_JOINT, least_confidence=0.5)


def _logits(
    training: TeacherLogitsTraining,
    model: ModelChoice,
    *,
    present: float = 1.0,
    noisy: int = 0,
    decay: float = 1.0,
) -> Callable[[int], Experiment]:
    return lambda seed: Experiment(
        seed,
        "teacher_logits",
        model,
        _ROUNDS,
        training,
        present=present,
        noisy=noisy,
        decay=decay,
    )


def _fedavg(model: ModelChoice, proximal_mu: float = 0.0) -> Callable[[int], Experiment]:
    return lambda seed: Experiment(seed, "fedavg", model, _ROUNDS, _PLAIN, proximal_mu=proximal_mu)


def _prototypes(settings: PrototypesSettings, model: ModelChoice) -> Callable[[int], Experiment]:
    return lambda seed: Experiment(seed, "prototypes", model, _ROUNDS, _PLAIN, prototypes=settings)


def _pooled(seed: int) -> Experiment:
    return Experiment(seed, "pooled", _ADAM, _ROUNDS, _PLAIN)


def _with_attention(model: ModelChoice) -> ModelChoice:
    return replace(model, attention=True)


# FD's network, whose last hidden layer is 60 wide. Of six each by validation: pull 0.1, 1, 10; the
# rate as FD's, and falling as FD's own best.
_EMBEDDED = PrototypesSettings(
    PrototypesTraining(2, 60, epochs=1, batch_size=128, learning_rate=3e-3, pull=1.0),
    rate_decay=0.6,
)
_ALONE = replace(_PLAIN, alpha=1.0, beta=0.0)
_AFD_MODEL = replace(_with_attention(_SEGMENTED), learning_rate=5e-3, mu1=0.99)

FLEET_ROWS = (
    Row(AFD, "joint loss, attention, segmented optimizer (no switch)", _logits(_JOINT, _AFD_MODEL)),
    Row(BASELINE, "labels and teachers, CNN, Adam (Jeong et al. 2018)", _logits(_PLAIN, _ADAM)),
    Row("FD + KL + L2", "the joint loss alone", _logits(_JOINT, _ADAM)),
    Row("FD + attention", "the encoding alone", _logits(_PLAIN, _with_attention(_ADAM))),
    Row("FD + segmented", "the optimizer's first segment alone", _logits(_PLAIN, _SEGMENTED)),
    Row(
        "FD, Adam at 3e-3",
        "Adam's own best rate, for the optimizer's time",
        _logits(_PLAIN, replace(_ADAM, learning_rate=3e-3)),
    ),
    Row(
        "FD + SGD",
        "plain steps, for the optimizer's time",
        _logits(_PLAIN, replace(_ADAM, optimizer="sgd", learning_rate=0.3)),
    ),
    Row(
        "AFD, falling rate",
        "beyond the paper: the rate halves each round",
        _logits(_JOINT, _AFD_MODEL, decay=0.5),
    ),
    Row(
        "FD, falling rate",
        "the same for FD: Adam from 3e-3, by 0.6 a round",
        _logits(_PLAIN, replace(_ADAM, learning_rate=3e-3), decay=0.6),
    ),
    Row(
        "FedAvg, Wide & Deep", "models are exchanged", _fedavg(replace(_ADAM, network="wide_deep"))
    ),
    Row("FedAvg, DIN", "models are exchanged", _fedavg(replace(_ADAM, network="din"))),
    Row("FedAvg, CNN", "FD's network under FedAvg", _fedavg(_ADAM)),
    Row(
        "FedProx, Wide & Deep",
        "mu = 0.01",
        _fedavg(replace(_ADAM, network="wide_deep"), proximal_mu=0.01),
    ),
    Row("local only", "FD's network, nothing exchanged", _logits(_ALONE, _ADAM)),
    Row(
        "FD, falling rate, alone",
        "its recipe without the teachers",
        _logits(_ALONE, replace(_ADAM, learning_rate=3e-3), decay=0.6),
    ),
    Row(
        "AFD, falling rate, alone",
        "its recipe without the teachers",
        _logits(replace(_ALONE, l2=1e-4), _AFD_MODEL, decay=0.5),
    ),
    Row(
        "FedProto, falling rate",
        "mean embeddings by label in place of outputs",
        _prototypes(_EMBEDDED, _ADAM),
    ),
    Row(
        "FedTGP, falling rate",
        "the server trains the prototypes",
        _prototypes(replace(_EMBEDDED, trained=True), _ADAM),
    ),
    Row("pooled", "FD's network on everybody's samples (AGG)", _pooled),
)

HARDER_ROWS = (
    Row("AFD, int8", "knowledge in 255ths", _logits(replace(_JOINT, precision="int8"), _AFD_MODEL)),
    Row(
        "AFD, half present", "two of four devices a round", _logits(_JOINT, _AFD_MODEL, present=0.5)
    ),
    Row("AFD, one liar", "a device sends noise, unbounded", _logits(_JOINT, _AFD_MODEL, noisy=1)),
    Row(
        "AFD, one liar, bounds",
        "the same, confidence at least 1/2",
        _logits(_BOUNDED, _AFD_MODEL, noisy=1),
    ),
)
"""Beyond the paper. With two classes the top class alone carries all of a row: no row for it."""

ROWS = (*FLEET_ROWS, *HARDER_ROWS)


@dataclass(frozen=True, slots=True)
class PaperFigures:
    """None where the paper gives no figure. ``by_device``: MAE of devices A to D (table 5).

    ``minutes``: training time for 400 iterations of 128 samples.
    """

    accuracy: float | None = None
    auc: float | None = None
    ndcg: float | None = None
    mae: float | None = None
    by_device: tuple[float, ...] = ()
    minutes: float | None = None


PAPER: Mapping[str, PaperFigures] = {
    "AFD": PaperFigures(0.84, 0.78, 0.92, 0.19, (0.15, 0.23, 0.20, 0.17), 13.4),
    "FD": PaperFigures(None, 0.69, 0.81, 0.24, (0.18, 0.27, 0.26, 0.23), 32.0),
    "FD + KL + L2": PaperFigures(None, 0.72, 0.83, 0.23, (), 34.6),
    "FD + attention": PaperFigures(None, 0.75, 0.87, 0.21, (), 37.2),
    "FD + segmented": PaperFigures(None, 0.69, 0.81, 0.24, (), 12.7),
    "FedAvg, Wide & Deep": PaperFigures(None, None, 0.82, 0.29, (0.24, 0.33, 0.31, 0.28)),
    "FedAvg, DIN": PaperFigures(None, None, 0.85, 0.21, (0.16, 0.25, 0.22, 0.21)),
}
"""By this benchmark's names of rows. Table 6's AUC of FWD and FDIN is for both with attention."""
