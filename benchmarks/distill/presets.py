"""The rows of the tables: settings chosen on validation samples, and what each row changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from aggregator.methods.prototypes import PrototypesSettings
from benchmarks.distill.experiment import Experiment, ModelChoice
from device_sdk.methods.prototypes.contract import PrototypesTraining
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining

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


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: what it shows, and the experiment of a seed."""

    name: str
    shows: str
    make: Callable[[int], Experiment]


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
    PrototypesTraining(2, 60, batch_size=128, learning_rate=3e-3, pull=1.0), rate_decay=0.6
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
