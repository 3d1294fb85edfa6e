"""Settings of each fleet, chosen on validation data with seed 0, and the rows of the tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from aggregator.methods.attention import AttentionSettings
from aggregator.methods.mixtures import MixtureSettings
from benchmarks.attention.experiment import DATA, DataName, Experiment, Local
from device_sdk.wire.attention_settings import AttentionTraining

__all__ = ["BEST", "OBSERVED", "ROWS", "STAGES", "TABLES", "Row", "stage_devices"]

BEST = "FedAMN"
"""The row that the others are compared with, seed by seed."""

OBSERVED = "Dongsi"
_CENTRE = (OBSERVED, "Guanyuan", "Tiantan", "Wanshouxigong")
_CITY = (*_CENTRE, "Aotizhongxin", "Gucheng", "Nongzhanguan", "Wanliu")
STAGES: tuple[tuple[str, ...], ...] = ((OBSERVED,), _CENTRE, _CITY, ())
"""Figure 6: a station in the centre, with three others there, with all of the city, and with the
four far outside (Changping, Dingling, Huairou, Shunyi; empty for all twelve)."""

TABLES = {
    "vmnist": "V-MNIST, 18 devices",
    "air": "Beijing air, 12 stations",
    "air-missing": "Beijing air, each station without 2 of its 13 measured features",
    "air-widths": "Beijing air, GRUs of 32 and 64 by turns",
    "neighbours": "V-MNIST, fetching the n favoured neighbours",
    "joining": f"Beijing air, accuracy at {OBSERVED} as others join (figure 6)",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: what it shows, and its experiment for a seed."""

    table: str
    name: str
    shows: str
    make: Callable[[int], Experiment]


def stage_devices(stage: int) -> int:
    """Number of stations that take part in a stage of ``joining``."""
    return len(STAGES[stage]) or 12


# Learning rate and its fall a round, for every method; the module that is FedPer's personal layer.
_RATE = {"vmnist": 0.1, "air": 0.2, "air-missing": 0.2, "air-widths": 0.2}
_DECAY = 0.88
_HEAD = {"vmnist": "classifier.2", "air": "head", "air-missing": "head", "air-widths": "head"}
# How much layer 1 starts by preferring near sketches, how much layer 2 its mixture, and the own
# network's weight beside the favourite neighbour's.
_OWN_BIAS = {"vmnist": 3.0, "air": 0.0, "air-missing": 3.0, "air-widths": 0.0}
_KEY_SCALE = {"vmnist": 5.0, "air": 0.0, "air-missing": 5.0, "air-widths": 0.0}
_OWN_WEIGHT = {"vmnist": 0.0, "air": 1.0, "air-missing": 0.0, "air-widths": 1.0}
_META_RATE = {"vmnist": 0.01, "air": 0.02, "air-missing": 0.01, "air-widths": 0.02}
# FedAMP's alpha / sigma, its sigma, and its pull towards the mixture.
_FEDAMP = {
    "vmnist": (5.0, 0.2, 0.0),
    "air": (0.5, 0.5, 0.1),
    "air-missing": (2.0, 0.3, 0.0),
    "air-widths": (2.0, 0.3, 0.0),
}
_ROUNDS = 20
_STEPS = 30
_BATCH = 32
# A single step a round has no momentum to carry it: a rate of ten times that of the others.
_SGD_BATCH = 256
_SGD_RATE = 0.5


def _amn(data: DataName) -> AttentionTraining:
    return AttentionTraining(
        warm_up_rounds=4,
        base_steps=_STEPS,
        batch_size=_BATCH,
        learning_rate=_RATE[data],
        meta_every=10,
        meta_learning_rate=_META_RATE[data],
        own_weight=_OWN_WEIGHT[data],
    )


def _experiment(
    data: DataName, seed: int, method: AttentionSettings | Local, shows: str = "personal"
) -> Experiment:
    return Experiment(
        data=data,
        seed=seed,
        rounds=_ROUNDS,
        method=method,
        shows="global" if shows == "global" else "personal",
        decay=_DECAY,
        key_scale=_KEY_SCALE[data],
        own_bias=_OWN_BIAS[data],
    )


def _attention(data: DataName, seed: int, **changes: object) -> Experiment:
    told = replace(_amn(data), **changes)  # type: ignore[arg-type]
    return _experiment(data, seed, AttentionSettings(training=told))


def _without_mixing(data: DataName, seed: int, shows: str, **changes: object) -> Experiment:
    told = replace(_amn(data), mix=False, **changes)  # type: ignore[arg-type]
    return _experiment(data, seed, AttentionSettings(training=told), shows)


def _local(data: DataName, seed: int) -> Experiment:
    return _experiment(data, seed, Local(_STEPS, _BATCH, _RATE[data]))


def _fedamp(data: DataName, seed: int) -> Experiment:
    rate, sigma, pull = _FEDAMP[data]
    told = replace(_amn(data), aggregator_mixes=True, proximal=pull)
    mixture = MixtureSettings(rule="fedamp", amp_rate=rate, amp_sigma=sigma)
    return _experiment(data, seed, AttentionSettings(training=told, mixture=mixture))


def _printed(data: DataName, seed: int) -> Experiment:
    """As the paper prints it: the own network among the others, and nothing known beforehand."""
    found = _attention(data, seed, own_weight=0.0, include_self=True)
    return replace(found, key_scale=0.0, own_bias=0.0)


def _placed(data: DataName, seed: int) -> Experiment:
    told = replace(_amn(data), aggregator_mixes=True)
    mixture = MixtureSettings(sharpness=max(_KEY_SCALE[data], 1.0), own_bias=_OWN_BIAS[data])
    return _experiment(data, seed, AttentionSettings(training=told, mixture=mixture))


def _main_rows(data: DataName) -> list[Row]:
    head = _HEAD[data]

    def row(name: str, shows: str, make: Callable[[int], Experiment]) -> Row:
        return Row(data, name, shows, make)

    def plain(shows: str, **changes: object) -> Callable[[int], Experiment]:
        return lambda seed: _without_mixing(data, seed, shows, **changes)

    def attention(**changes: object) -> Callable[[int], Experiment]:
        return lambda seed: _attention(data, seed, **changes)

    sgd = {"base_steps": 1, "batch_size": _SGD_BATCH, "learning_rate": _SGD_RATE}
    rows = [
        row("local only", "every device for itself", lambda seed: _local(data, seed)),
        row("FedSGD", f"one step a round on {_SGD_BATCH} samples", plain("global", **sgd)),
        row("FedAvg", "the global model", plain("global")),
        row("FedProx", "the global model, mu 0.1", plain("global", proximal=0.1)),
        row("FedPer", "the last layer stays", plain("personal", keeps=head)),
        row("FTL", "the global model, fine-tuned by a round's steps", plain("personal")),
        row("FedAMP", "attention at the aggregator", lambda seed: _fedamp(data, seed)),
        row("FedAMN layer 1", "neighbours, no global model", attention(layers="first")),
        row("FedAMN layer 2", "own and global model", attention(layers="second")),
        row(BEST, "both layers", attention()),
        row("FedAMN placed", "mixed by the aggregator", lambda seed: _placed(data, seed)),
    ]
    rows.append(row("FedAMN as printed", "learns its own share", lambda s: _printed(data, s)))
    if data in ("vmnist", "air"):
        rows += [
            row("FedAMN unlearned", "attention as it starts", attention(meta_learning_rate=0.0)),
            row("FedAMN full", "a meta-step before each base step", attention(meta_every=1)),
        ]
    return rows


def _neighbour_rows() -> list[Row]:
    def make(count: int) -> Callable[[int], Experiment]:
        return lambda seed: _attention("vmnist", seed, neighbours=count)

    counts = (2, 4, 8, 0)
    return [
        Row("neighbours", f"n = {n or 'all'}", "favoured neighbours' vectors a round", make(n))
        for n in counts
    ]


def _joining_rows() -> list[Row]:
    makers: dict[str, Callable[[int], Experiment]] = {
        "FedAvg": lambda seed: _without_mixing("air", seed, "global"),
        "FTL": lambda seed: _without_mixing("air", seed, "personal"),
        "FedAMP": lambda seed: _fedamp("air", seed),
        BEST: lambda seed: _attention("air", seed),
    }

    def at(make: Callable[[int], Experiment], stage: int) -> Callable[[int], Experiment]:
        return lambda seed: replace(make(seed), devices=STAGES[stage])

    return [
        Row("joining", f"{name}, {stage_devices(stage)}", "stations in all", at(make, stage))
        for name, make in makers.items()
        for stage in range(len(STAGES))
    ]


ROWS: tuple[Row, ...] = (
    *(row for data in DATA for row in _main_rows(data)),  # type: ignore[arg-type]
    *_neighbour_rows(),
    *_joining_rows(),
)
