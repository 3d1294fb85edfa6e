"""A run as data; and the rows, whose settings were chosen on validation samples of seed 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from aggregator.methods.prototypes import PrototypeServerSettings, PrototypesSettings
from benchmarks import harness
from benchmarks.mutual.domains import Split
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.mutual.contract import MutualTraining
from device_sdk.methods.prototypes.contract import PrototypesTraining

FourModels = tuple[str, str, str, str]
MethodName = Literal["alone", "pooled", "mutual", "fedavg", "prototypes"]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run over four domains, one device each.

    Attributes:
        data: ``rmnist`` or ``pacs64``.
        split: of Rotated MNIST; PACS's domains have no image in common.
        share: public part of all samples of a domain.
        seed: of the whole run. Runs that share it share images, splits and first weights.
        models: of the four devices, by domain.
        method: ``alone`` trains on the own samples (IND), ``pooled`` on these and all public ones
            (AGG), ``mutual``, ``fedavg`` and ``prototypes`` by the methods of these names.
        rounds: at most.
        steps: a round's, for ``alone`` and ``pooled``.
        learning_rate: for ``alone`` and ``pooled``; 0 for the artifact's.
        mutual, fedavg, prototypes: settings of those methods.
        stale_rounds: see ``aggregator.methods.mutual``.
        present: devices that take part in a round, drawn at random.
        random_device: one whose soft labels are drawn at random; -1 for none.
        update_codec: how float32 arrays travel up.
        most_bytes: a device's up and down; the run ends before a round that would exceed it. 0 for
            no limit.
        every: rounds between looks at the validation samples.
    """

    data: Literal["rmnist", "pacs64"]
    split: Split
    share: float
    seed: int
    models: FourModels
    method: MethodName
    rounds: int
    steps: int = 0
    learning_rate: float = 0.0
    mutual: MutualTraining | None = None
    fedavg: FedAvgTraining | None = None
    stale_rounds: int = 0
    present: int = 4
    random_device: int = -1
    update_codec: Literal["float32", "float16", "int8"] = "float16"
    most_bytes: int = 0
    every: int = 1
    prototypes: PrototypesSettings | None = None

    def __post_init__(self) -> None:
        settings = {
            "mutual": self.mutual,
            "fedavg": self.fedavg,
            "prototypes": self.prototypes,
        }
        for name, given in settings.items():
            if (self.method == name) != (given is not None):
                raise ValueError(f"method {self.method!r} goes with its own settings, not {name}'s")
        if self.rounds < 1 or self.every < 1 or not 1 <= self.present <= 4:
            raise ValueError("an experiment needs rounds and between one and four devices in each")


@dataclass(frozen=True, slots=True)
class DeviceScore:
    """One device's accuracies in percent, of the round that its validation chose.

    ``acc`` on all domains' test samples, ``bwt`` on its own, ``fwt`` on the others' (papers/mafml,
    section 3.2); ``validation`` on all domains' validation samples.
    """

    round: int
    validation: float
    acc: float
    bwt: float
    fwt: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Scores by device, and what they cost.

    ``curve`` is the devices' mean validation accuracy at each look; bytes are a device's mean over
    the whole run, sealed; ``conflict_share`` is NaN-free: -1 where nothing was projected.
    """

    devices: tuple[DeviceScore, ...]
    curve: tuple[float, ...]
    rounds: int
    bytes_up: float
    bytes_down: float
    conflict_share: float
    seconds: float

    @property
    def bytes(self) -> float:
        """A device's, both ways."""
        return self.bytes_up + self.bytes_down

    def mean(self, what: str, leave_out: int = -1) -> float:
        """Over devices, of ``acc``, ``bwt``, ``fwt`` or ``validation``, but one of them."""
        values = [
            float(getattr(score, what))
            for place, score in enumerate(self.devices)
            if place != leave_out
        ]
        return sum(values) / len(values)


LENETS: FourModels = ("lenet", "lenet", "lenet", "lenet")
FOUR: FourModels = ("resnet", "alexnet", "lenet", "vgg")

TABLES = {
    "independent": "Rotated MNIST, LeNet, every domain split by itself (MAFML, table 1)",
    "by-image": "Rotated MNIST, LeNet, split by image: no test image trains in any rotation",
    "architectures": f"Rotated MNIST, four architectures: {', '.join(FOUR)}",
    "pacs64": f"PACS at 64 x 64, four architectures: {', '.join(FOUR)} (MAFML, table 2)",
    "variants": "Rotated MNIST, LeNet, 10 % shared: what else was tried",
}


@dataclass(frozen=True, slots=True)
class Paper:
    """The paper's mean figures."""

    acc: float
    bwt: float
    fwt: float


@dataclass(frozen=True, slots=True)
class Row(harness.Row[Experiment]):
    """``paper`` has the paper's figures; ``equal_bytes`` names the row of the same table whose
    bytes are this one's limit; ``leave_out`` a device whose own scores do not count."""

    paper: Paper | None = None
    equal_bytes: str = ""
    leave_out: int = -1


def _row(table: str, name: str, make: Callable[[int], Experiment], **more: Any) -> Row:
    return Row(name, "", make, table, **more)


_MUTUAL = MutualTraining(
    classes=10,
    local_steps=40,
    batch_size=32,
    public_batch=16,
    learning_rate=0.002,
    # Without loss: a drawing is mostly empty. FedMD's samples travel the same way.
    sample_form="deflate",
)
_FEDMD = replace(
    _MUTUAL,
    local_steps=20,
    combine="mean",
    schedule="in_turn",
    weight_ce=0.0,
    project=False,
    use_confidence=False,
)
_FEDAVG = FedAvgTraining(epochs=2, batch_size=32, learning_rate=0.002)
# The best by validation of six each, LeNet split independently: pull 0.1, 0.3, 1, 3, 10, 30;
# pull 0.1, 1, 10 with the server's rate at 0.01 and 0.1.
_PROTOTYPES = {
    "FedProto": PrototypesSettings(
        PrototypesTraining(10, epochs=2, batch_size=32, learning_rate=0.002, pull=0.3)
    ),
    "FedTGP": PrototypesSettings(
        PrototypesTraining(10, epochs=2, batch_size=32, learning_rate=0.002, pull=0.1),
        trained=True,
        server=PrototypeServerSettings(learning_rate=0.01),
    ),
    "FedProto, pull 0": PrototypesSettings(
        PrototypesTraining(10, epochs=2, batch_size=32, learning_rate=0.002, pull=0.0)
    ),
}
"""The last one is its network alone: what comes of the others is looked at, and not used."""


def _base(method: MethodName, split: Split, share: float, seed: int) -> Experiment:
    base = Experiment("rmnist", split, share, seed, LENETS, "alone", rounds=22, steps=36)
    base = replace(base, learning_rate=0.002)
    if method == "mutual":
        return replace(base, method="mutual", mutual=_MUTUAL, steps=0, learning_rate=0.0, rounds=11)
    if method == "fedavg":
        return replace(base, method="fedavg", fedavg=_FEDAVG, steps=0, learning_rate=0.0, rounds=24)
    return replace(base, method=method)


def _table_one(table: str, split: Split) -> list[Row]:
    paper = {
        0.05: ((87.79, 94.00, 86.00), (85.13, 92.33, 82.73), (85.09, 91.50, 82.95)),
        0.10: ((88.21, 92.67, 87.67), (85.25, 92.00, 83.00), (85.09, 91.17, 83.06)),
        0.15: ((89.21, 92.33, 88.17), (87.83, 92.36, 86.22), (86.75, 91.33, 85.22)),
    }
    rows = []
    for share, (mafml, agg, fedmd) in paper.items():
        rows += [
            _row(table, f"MAFML {share:.0%}", _made("mutual", split, share), paper=Paper(*mafml)),
            _row(table, f"AGG {share:.0%}", _made("pooled", split, share), paper=Paper(*agg)),
            _row(table, f"FedMD {share:.0%}", _fedmd(split, share), paper=Paper(*fedmd)),
            _row(
                table,
                f"FedAvg, bytes of MAFML {share:.0%}",
                _frugal(split, share),
                paper=Paper(86.50, 86.50, 86.50),
                equal_bytes=f"MAFML {share:.0%}",
            ),
        ]
    ind = Paper(68.45, 92.56, 60.47)
    rows.append(_row(table, "IND", _made("alone", split, 0.10), paper=ind))
    rows.append(_row(table, "FedAvg, full", _made("fedavg", split, 0.10)))
    rows += [_row(table, name, _prototypes(name, split)) for name in _PROTOTYPES]
    return rows


def _made(method: MethodName, split: Split, share: float) -> Callable[[int], Experiment]:
    return lambda seed: _base(method, split, share, seed)


def _fedmd(split: Split, share: float) -> Callable[[int], Experiment]:
    return lambda seed: replace(_base("mutual", split, share, seed), mutual=_FEDMD, rounds=22)


def _prototypes(name: str, split: Split) -> Callable[[int], Experiment]:
    return lambda seed: replace(
        _base("fedavg", split, 0.10, seed),
        method="prototypes",
        fedavg=None,
        prototypes=_PROTOTYPES[name],
    )


def _frugal(split: Split, share: float) -> Callable[[int], Experiment]:
    def make(seed: int) -> Experiment:
        # So few rounds fit that each takes many steps; int8 makes them one more.
        training = replace(_FEDAVG, epochs=10)
        base = replace(_base("fedavg", split, share, seed), fedavg=training)
        return replace(base, update_codec="int8")

    return make


def _four(make: Callable[[int], Experiment]) -> Callable[[int], Experiment]:
    return lambda seed: replace(make(seed), models=FOUR)


def _on_pacs(make: Callable[[int], Experiment]) -> Callable[[int], Experiment]:
    def on_pacs(seed: int) -> Experiment:
        base = replace(make(seed), data="pacs64", models=FOUR)
        if base.mutual is None:
            return replace(base, learning_rate=0.001)
        return replace(base, mutual=replace(base.mutual, classes=7, learning_rate=0.001))

    return on_pacs


def _changed(**changes: object) -> Callable[[int], Experiment]:
    """MAFML at 10 %, with other settings: of the method, or of the run."""
    own = {name: value for name, value in changes.items() if hasattr(_MUTUAL, name)}
    rest = {name: value for name, value in changes.items() if name not in own}

    def make(seed: int) -> Experiment:
        training = replace(_MUTUAL, **own)  # type: ignore[arg-type]
        base = replace(_base("mutual", "independent", 0.10, seed), mutual=training)
        return replace(base, **rest)  # type: ignore[arg-type]

    return make


# MAFML at 10 %, with other settings: half of the devices a round is for twice the rounds, so that
# each trains as much; of a wild device, the last, only the others' scores count.
_HALF = {"present": 2, "rounds": 22}
_WILD = {"random_device": 3}
_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "MAFML": {},
    "soft labels in 8 bits": {"label_form": "uint8"},
    "public samples not packed": {"sample_form": "uint8"},
    "top 3 classes": {"top_classes": 3},
    "top 3 classes in 8 bits": {"label_form": "uint8", "top_classes": 3},
    "half missing": _HALF,
    "half missing, labels kept 5 rounds": {"stale_rounds": 5, **_HALF},
    "MAFML, but device 4": {},
    "device 4 random": _WILD,
    "device 4 random, below 50 % unused": {"least_confidence": 0.5, **_WILD},
    "device 4 random, no confidence": {"use_confidence": False, **_WILD},
    "no projection": {"project": False},
    "no soft labels (classes alone)": {"weight_kl": 0.0},
    "local and public gradient in one step": {"schedule": "joint", "local_steps": 55},
    "algorithm 1 as printed (a step for each teacher)": {"per_teacher": True},
}


def _variants() -> list[Row]:
    return [
        _row("variants", name, _changed(**changes), leave_out=3 if "device 4" in name else -1)
        for name, changes in _VARIANTS.items()
    ]


def _several(
    table: str,
    change: Callable[[Callable[[int], Experiment]], Callable[[int], Experiment]],
    paper: tuple[Paper | None, ...],
) -> list[Row]:
    made = (
        ("MAFML 10%", _made("mutual", "independent", 0.10)),
        ("AGG 10%", _made("pooled", "independent", 0.10)),
        ("FedMD 10%", _fedmd("independent", 0.10)),
        ("IND", _made("alone", "independent", 0.10)),
    )
    return [
        _row(table, name, change(make), paper=figures)
        for (name, make), figures in zip(made, paper, strict=True)
    ]


ROWS: tuple[Row, ...] = (
    *_table_one("independent", "independent"),
    *_table_one("by-image", "by-image"),
    *_several("architectures", _four, (None, None, None, None)),
    *(_row("architectures", name, _four(_prototypes(name, "independent"))) for name in _PROTOTYPES),
    *_several(
        "pacs64",
        _on_pacs,
        (
            Paper(77.24, 94.71, 70.59),
            Paper(77.00, 94.20, 70.14),
            Paper(74.11, 92.55, 67.08),
            Paper(60.53, 94.25, 48.83),
        ),
    ),
    *_variants(),
)
