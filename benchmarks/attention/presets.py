"""Settings of each fleet and method, chosen on validation data with seed 0."""

from __future__ import annotations

from dataclasses import replace

from aggregator.methods.attention.method import AttentionSettings
from aggregator.methods.attention.mixtures import MixtureSettings
from benchmarks.attention.experiment import DataName, Experiment, Local, Shown
from device_sdk.methods.attention.contract import AttentionTraining

__all__ = [
    *("HEAD", "ROUNDS", "SGD_BATCH", "SGD_RATE"),
    *("attention", "fedamp", "local", "placed", "printed", "without_mixing"),
]

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
ROUNDS = 20
_STEPS = 30
_BATCH = 32
# A single step a round has no momentum to carry it: a rate of ten times that of the others.
SGD_BATCH = 256
SGD_RATE = 0.5


def attention(data: DataName, seed: int, **changes: object) -> Experiment:
    """FedAMN; ``changes`` to its training settings."""
    told = replace(_training(data), own_weight=_OWN_WEIGHT[data], meta_batch_size=_META_BATCH[data])
    found = _experiment(data, seed, AttentionSettings(training=replace(told, **changes)))  # type: ignore[arg-type]
    return replace(found, key_scale=_KEY_SCALE[data], own_bias=_OWN_BIAS[data])


def printed(data: DataName, seed: int) -> Experiment:
    """As the paper prints it: the own network among the others, and nothing known beforehand."""
    found = attention(data, seed, own_weight=0.0, include_self=True)
    return replace(found, key_scale=0.0, own_bias=0.0)


def placed(data: DataName, seed: int) -> Experiment:
    """FedAMN's mixtures as attention starts, made by the aggregator."""
    told = replace(_training(data), own_weight=_OWN_WEIGHT[data], aggregator_mixes=True)
    mixture = MixtureSettings(sharpness=max(_KEY_SCALE[data], 1.0), own_bias=_OWN_BIAS[data])
    return _experiment(data, seed, AttentionSettings(training=told, mixture=mixture))


def fedamp(data: DataName, seed: int) -> Experiment:
    """FedAMP (Huang et al. 2021)."""
    rate, sigma, pull = _FEDAMP[data]
    told = replace(_training(data), aggregator_mixes=True, proximal=pull)
    mixture = MixtureSettings(rule="fedamp", amp_rate=rate, amp_sigma=sigma)
    return _experiment(data, seed, AttentionSettings(training=told, mixture=mixture))


def without_mixing(data: DataName, seed: int, shows: Shown, **changes: object) -> Experiment:
    """One global model; ``changes`` to the training settings."""
    told = replace(_training(data), mix=False, **changes)  # type: ignore[arg-type]
    return replace(_experiment(data, seed, AttentionSettings(training=told)), shows=shows)


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
    )


def _experiment(data: DataName, seed: int, method: AttentionSettings | Local) -> Experiment:
    return Experiment(data=data, seed=seed, rounds=ROUNDS, method=method, decay=_DECAY)
