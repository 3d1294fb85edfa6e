"""A run as data; and the rows, whose settings were chosen on validation data of seed 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from aggregator.methods.attention import AttentionSettings, MixtureSettings
from aggregator.methods.fedavg import FedAvgSettings
from benchmarks.datasets.untouched import UNTOUCHED
from benchmarks.datasets.vmnist import DEVICES_A_VARIANT, VARIANTS
from benchmarks.harness import Row
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.fedavg.contract import FedAvgTraining

DataName = Literal["vmnist", "air", "air-missing", "air-widths"]
Shown = Literal["personal", "global"]
DATA: tuple[str, ...] = get_args(DataName)


@dataclass(frozen=True, slots=True)
class Local:
    """Every device for itself: so many steps a round, nothing shared; at a rate of 0 with the
    artifact's own."""

    steps: int = 30
    batch_size: int = 32
    learning_rate: float = 0.1


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run over a fleet.

    Attributes:
        data: which fleet: one of ``DATA`` or of ``UNTOUCHED``.
        seed: of the whole run: first parameters, batches, and who lacks which features.
        rounds: at most so many.
        decay: the learning rate falls by this factor a round, for every method.
        every: rounds between evaluations; the one that is best on validation is reported.
        method: settings of the method's halves.
        shows: ``personal`` evaluates each device's own model after its steps, ``global`` the model
            that all share.
        key_scale: see :class:`export.models.attention_meta.AttentionMeta`.
        own_bias: likewise.
        weak: this share of the devices leaves mixing to the aggregator.
        devices: names of the fleet's devices that take part; all where there are none.
    """

    data: str
    seed: int
    rounds: int
    method: AttentionSettings | FedAvgSettings | Local
    shows: Shown = "personal"
    decay: float = 1.0
    every: int = 4
    key_scale: float = 0.0
    own_bias: float = 0.0
    weak: float = 0.0
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.every < 1:
            raise ValueError("an experiment needs rounds, and evaluations among them")


@dataclass(frozen=True, slots=True)
class Point:
    """After a round: means over the devices, of their own validation and test sets.

    ``seconds``: processor time that a device has spent on training so far, mean over the devices.
    """

    round_id: int
    validation: float
    accuracy: float
    precision: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Scores:
    """Whom each device listened to in a round, mean over the parameter groups.

    ``first``: per device its weights over all devices, in the fleet's order; ``second``: per device
    the share of the mixture, the rest being the global model's.
    """

    round_id: int
    first: list[list[float]]
    second: list[float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``curve`` of evaluated rounds; ``by_device`` test accuracy in the best of them.

    ``down_bytes`` and ``up_bytes``: mean a device and round, as encoded, seals and padding apart,
    over the rounds after the warm-up. ``round_seconds``: processor time of a device's round there.
    """

    curve: list[Point]
    by_device: dict[str, float]
    down_bytes: float
    up_bytes: float
    round_seconds: float
    scores: list[Scores] = field(default_factory=list)

    @property
    def best(self) -> Point:
        """The round that validation picks; the first of equals."""
        return max(self.curve, key=lambda point: point.validation)

    def seconds_to(self, accuracy: float) -> float | None:
        """A device's training time until test accuracy first reached this; None where it never
        did."""
        return next((p.seconds for p in self.curve if p.accuracy >= accuracy), None)


# Learning rate and its fall a round, for every method (on V-MNIST half and twice of it were worse
# for all but training alone); the module that is FedPer's personal layer.
_RATE = {"vmnist": 0.1, "air": 0.2, "air-missing": 0.2, "air-widths": 0.2}
_LOCAL_RATE = {**_RATE, "vmnist": 0.05}
_DECAY = 0.88
HEAD = {"vmnist": "classifier.2", "air": "head", "air-missing": "head", "air-widths": "head"}
# How much layer 1 starts by preferring near sketches, how much layer 2 its mixture, and the own
# network's weight beside the favourite neighbour's.
_OWN_BIAS = {"vmnist": 3.0, "air": 0.0, "air-missing": 3.0, "air-widths": 0.0}
_KEY_SCALE = {"vmnist": 5.0, "air": 0.0, "air-missing": 5.0, "air-widths": 0.0}
_OWN_WEIGHT = {"vmnist": 0.0, "air": 1.0, "air-missing": 4.0, "air-widths": 1.0}
_META_RATE = {"vmnist": 0.01, "air": 0.02, "air-missing": 0.01, "air-widths": 0.02}
# A meta-step on fewer samples costs less; with 8 validation on V-MNIST is that of 32.
_META_BATCH = {"vmnist": 8, "air": 32, "air-missing": 32, "air-widths": 32}
# FedAMP's alpha / sigma, its sigma, and its pull towards the mixture.
_FEDAMP = {
    "vmnist": (5.0, 0.2, 0.0),
    "air": (0.5, 0.5, 0.1),
    "air-missing": (2.0, 0.3, 0.0),
    "air-widths": (2.0, 0.3, 0.0),
}
_SKETCHES = MixtureSettings(rule="sketches")
ROUNDS = 20
_STEPS = 30
_BATCH = 32
# A single step a round has no momentum to carry it: a rate of ten times that of the others.
SGD_BATCH = 256
SGD_RATE = 0.5


def attention(data: DataName, seed: int, **changes: object) -> Experiment:
    """FedAMN; ``changes`` to its training settings."""
    told = replace(_training(data), own_weight=_OWN_WEIGHT[data], meta_batch_size=_META_BATCH[data])
    training = replace(told, **changes)  # type: ignore[arg-type]
    settings = AttentionSettings(training=training, mixture=_SKETCHES)
    found = _experiment(data, seed, settings)
    return replace(found, key_scale=_KEY_SCALE[data], own_bias=_OWN_BIAS[data])


def printed(data: DataName, seed: int) -> Experiment:
    """As the paper prints it: the own network among the others, and nothing known beforehand."""
    found = attention(data, seed, own_weight=0.0, include_self=True)
    return replace(found, key_scale=0.0, own_bias=0.0)


def placed(data: DataName, seed: int) -> Experiment:
    """FedAMN's mixtures as attention starts, made by the aggregator."""
    told = replace(_training(data), own_weight=_OWN_WEIGHT[data], aggregator_mixes=True)
    mixture = replace(_SKETCHES, sharpness=max(_KEY_SCALE[data], 1.0), own_bias=_OWN_BIAS[data])
    return _experiment(data, seed, AttentionSettings(training=told, mixture=mixture))


def likeness(data: DataName, seed: int) -> Experiment:
    """What ships: mixed by the aggregator, by likeness, for which nothing is chosen."""
    told = replace(_training(data), aggregator_mixes=True)
    return _experiment(data, seed, AttentionSettings(training=told))


def fedamp(data: DataName, seed: int) -> Experiment:
    """FedAMP (Huang et al. 2021)."""
    rate, sigma, pull = _FEDAMP[data]
    told = replace(_training(data), aggregator_mixes=True, proximal=pull)
    mixture = MixtureSettings(rule="fedamp", amp_rate=rate, amp_sigma=sigma)
    return _experiment(data, seed, AttentionSettings(training=told, mixture=mixture))


def without_mixing(data: DataName, seed: int, shows: Shown, **changes: object) -> Experiment:
    """One global model; ``changes`` to the training settings."""
    told = replace(_training(data), mix=False, **changes)  # type: ignore[arg-type]
    settings = AttentionSettings(training=told, mixture=_SKETCHES)
    return replace(_experiment(data, seed, settings), shows=shows)


def local(data: DataName, seed: int) -> Experiment:
    """Every device for itself."""
    return _experiment(data, seed, Local(_STEPS, _BATCH, _LOCAL_RATE[data]))


def _training(data: DataName) -> AttentionTraining:
    return AttentionTraining(
        warm_up_rounds=4,
        base_steps=_STEPS,
        batch_size=_BATCH,
        learning_rate=_RATE[data],
        meta_every=10,
        meta_learning_rate=_META_RATE[data],
        aggregator_mixes=False,
    )


def _experiment(data: DataName, seed: int, method: AttentionSettings | Local) -> Experiment:
    return Experiment(data=data, seed=seed, rounds=ROUNDS, method=method, decay=_DECAY)


BEST = "FedAMN"
"""The row that the others are compared with, seed by seed."""

OBSERVED = "Dongsi"
_CENTRE = (OBSERVED, "Guanyuan", "Tiantan", "Wanshouxigong")
_CITY = (*_CENTRE, "Aotizhongxin", "Gucheng", "Nongzhanguan", "Wanliu")
STAGES: tuple[tuple[str, ...], ...] = ((OBSERVED,), _CENTRE, _CITY, ())
"""Figure 6: a station in the centre, with three others there, with all of the city, and with the
four far outside (Changping, Dingling, Huairou, Shunyi; empty for all twelve)."""

KINDS = {
    "digits": tuple(
        f"{variant}.{number}"
        for variant in VARIANTS
        for number in range(1, DEVICES_A_VARIANT + 1)
        if variant != "fashion"
    ),
    "clothes": tuple(f"fashion.{number}" for number in range(1, DEVICES_A_VARIANT + 1)),
}
"""V-MNIST's devices by what their pictures show."""

TABLES = {
    "vmnist": "V-MNIST, 18 devices",
    "air": "Beijing air, 12 stations",
    "air-missing": "Beijing air, each station without 2 of its 13 measured features",
    "air-widths": "Beijing air, GRUs of 32 and 64 by turns",
    "neighbours": "V-MNIST, fetching the n favoured neighbours",
    "schedules": "V-MNIST, 40 rounds, the rate falling by a factor a round",
    "known": "V-MNIST, told beforehand which devices hold clothes",
    "untouched": "What ships, on fleets that nothing was chosen on",
    "joining": f"Beijing air, accuracy at {OBSERVED} as others join (figure 6)",
}


def stage_devices(stage: int) -> int:
    """Number of stations that take part in a stage of ``joining``."""
    return len(STAGES[stage]) or 12


def _main_rows(data: DataName) -> list[Row]:
    head = HEAD[data]

    def row(name: str, shows: str, make: Callable[[int], Experiment]) -> Row:
        return Row(name, shows, make, data)

    def plain(shows: Shown, **changes: object) -> Callable[[int], Experiment]:
        return lambda seed: without_mixing(data, seed, shows, **changes)

    def mixing(**changes: object) -> Callable[[int], Experiment]:
        return lambda seed: attention(data, seed, **changes)

    sgd = {"base_steps": 1, "batch_size": SGD_BATCH, "learning_rate": SGD_RATE}
    rows = [
        row("local only", "every device for itself", lambda seed: local(data, seed)),
        row("FedSGD", f"one step a round on {SGD_BATCH} samples", plain("global", **sgd)),
        row("FedAvg", "the global model", plain("global")),
        row("FedProx", "the global model, mu 0.1", plain("global", proximal=0.1)),
        row("FedPer", "the last layer stays", plain("personal", keeps=head)),
        row("FTL", "the global model, fine-tuned by a round's steps", plain("personal")),
        row("FedAMP", "attention at the aggregator", lambda seed: fedamp(data, seed)),
        row("FedAMN layer 1", "neighbours, no global model", mixing(layers="first")),
        row("FedAMN layer 2", "own and global model", mixing(layers="second")),
        row(BEST, "both layers", mixing()),
        row("FedAMN placed", "mixed by the aggregator", lambda seed: placed(data, seed)),
        row("likeness", "what ships, by the aggregator", lambda seed: likeness(data, seed)),
    ]
    rows.append(row("FedAMN as printed", "learns its own share", lambda s: printed(data, s)))
    if data in ("vmnist", "air"):
        rows += [
            row("FedAMN unlearned", "attention as it starts", mixing(meta_learning_rate=0.0)),
            row("FedAMN full", "a meta-step before each base step", mixing(meta_every=1)),
        ]
    return rows


def _neighbour_rows() -> list[Row]:
    def make(count: int) -> Callable[[int], Experiment]:
        return lambda seed: attention("vmnist", seed, neighbours=count)

    counts = (2, 4, 8, 0)
    return [
        Row(f"n = {n or 'all'}", "favoured neighbours' vectors a round", make(n), "neighbours")
        for n in counts
    ]


def _schedule_rows() -> list[Row]:
    makers: dict[str, Callable[[int], Experiment]] = {
        "FedAMP": lambda seed: fedamp("vmnist", seed),
        "FedAMN unlearned": lambda seed: attention("vmnist", seed, meta_learning_rate=0.0),
        BEST: lambda seed: attention("vmnist", seed),
    }

    def at(make: Callable[[int], Experiment], decay: float) -> Callable[[int], Experiment]:
        return lambda seed: replace(make(seed), rounds=2 * ROUNDS, decay=decay)

    return [
        Row(f"{name}, {decay}", "factor a round", at(make, decay), "schedules")
        for name, make in makers.items()
        for decay in (0.9, 0.94, 0.97)
    ]


def _known_rows() -> list[Row]:
    """A global model for each kind of picture, as if somebody had told the devices apart."""

    def among(devices: tuple[str, ...]) -> Callable[[int], Experiment]:
        return lambda seed: replace(without_mixing("vmnist", seed, "personal"), devices=devices)

    def row(name: str, make: Callable[[int], Experiment]) -> Row:
        return Row(name, "accuracy by kind", make, "known")

    return [
        *(row(f"FTL, {kind}", among(devices)) for kind, devices in KINDS.items()),
        row("FTL, all", among(())),
        row("FedAMP, all", lambda seed: fedamp("vmnist", seed)),
        row(f"{BEST}, all", lambda seed: attention("vmnist", seed)),
    ]


FINE_TUNED = "fine-tuned"
"""The untouched rows that the others are compared with."""


def _untouched_rows() -> list[Row]:
    """The shipped defaults, and what they must not lose to: as many steps of the same batch and
    rate."""
    defaults = AttentionTraining()
    fedavg = FedAvgTraining(
        epochs=defaults.base_steps,
        most_steps=defaults.base_steps,
        batch_size=defaults.batch_size,
        learning_rate=defaults.learning_rate,
    )
    methods: dict[str, AttentionSettings | FedAvgSettings | Local] = {
        FINE_TUNED: AttentionSettings(training=replace(defaults, mix=False)),
        "attention": AttentionSettings(),
        "FedAvg's personal": FedAvgSettings(training=fedavg),
        "alone": Local(defaults.base_steps, defaults.batch_size, defaults.learning_rate),
        "on devices": AttentionSettings(training=replace(defaults, aggregator_mixes=False)),
    }

    def run(data: str, method: AttentionSettings | FedAvgSettings | Local) -> Callable[[int], Any]:
        return lambda seed: Experiment(data=data, seed=seed, rounds=ROUNDS, method=method)

    return [
        Row(f"{data}, {name}", "defaults", run(data, method), "untouched")
        for data in UNTOUCHED
        for name, method in methods.items()
    ]


def _joining_rows() -> list[Row]:
    makers: dict[str, Callable[[int], Experiment]] = {
        "FedAvg": lambda seed: without_mixing("air", seed, "global"),
        "FTL": lambda seed: without_mixing("air", seed, "personal"),
        "FedAMP": lambda seed: fedamp("air", seed),
        BEST: lambda seed: attention("air", seed),
    }

    def at(make: Callable[[int], Experiment], stage: int) -> Callable[[int], Experiment]:
        return lambda seed: replace(make(seed), devices=STAGES[stage])

    return [
        Row(f"{name}, {stage_devices(stage)}", "stations in all", at(make, stage), "joining")
        for name, make in makers.items()
        for stage in range(len(STAGES))
    ]


ROWS: tuple[Row, ...] = (
    *(row for data in DATA for row in _main_rows(data)),  # type: ignore[arg-type]
    *_neighbour_rows(),
    *_schedule_rows(),
    *_known_rows(),
    *_untouched_rows(),
    *_joining_rows(),
)
