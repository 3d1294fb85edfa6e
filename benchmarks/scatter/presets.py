"""Settings of each data set, chosen on validation items, and the rows of the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from aggregator.methods.scatter import ScatterSettings
from aggregator.methods.server_optimizer import OptimizerSettings
from benchmarks.scatter.experiment import Experiment
from device_sdk.methods.scatter.contract import BprTraining
from device_sdk.methods.scatter.triples import PoolSettings

CLASSES = (8, 16, 32, 64)
BASELINE = "all at K"
"""The row that the others are compared with, seed by seed."""

_WIDTH = 64
DEVICES = {"ml-100k": 943, "ml-1m": 6040}
"""Users of each data set, a device each."""
_NO_PSEUDO = PoolSettings(pseudo_per_positive=0.0)


def preset(data: str, split: Literal["test", "validation"], seed: int) -> Experiment:
    """The default method on ``data`` with every device at K; raises ValueError for other names."""
    if data == "ml-100k":
        training = BprTraining(
            user_learning_rate=0.7, user_l2=0.01, item_l2=0.001, user_spread=0.01
        )
        return _experiment(data, split, seed, training, epochs=40, cohort=128, decay=0.98)
    if data == "ml-1m":
        training = BprTraining(
            user_learning_rate=2.0, user_l2=0.02, item_l2=0.001, user_spread=0.01
        )
        return _experiment(data, split, seed, training, epochs=33, cohort=256, decay=0.976)
    raise ValueError(f"no preset for data set {data!r}; expected 'ml-100k' or 'ml-1m'")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: what it shows, and how it differs from the preset."""

    name: str
    shows: str
    change: Callable[[Experiment], Experiment]


# Passes of an unequal fleet for one of an equal fleet's, chosen on validation.
_LONGER = {"ml-100k": 2.5, "ml-1m": 2.0}


def _mixed(base: Experiment) -> Experiment:
    # Weak devices move a part of their vectors a round, so such a fleet is at its best later. And a
    # column is drawn by 47 % of the devices, so that its mean is noisier: a rate lower by the root
    # of that share gains a point of NDCG.
    coverage = sum(CLASSES) / len(CLASSES) / base.width
    optimizer = base.settings.optimizer
    optimizer = replace(optimizer, learning_rate=optimizer.learning_rate * math.sqrt(coverage))
    return replace(
        base,
        classes=CLASSES,
        epochs=round(base.epochs * _LONGER[base.data]),
        settings=replace(base.settings, optimizer=optimizer),
    )


def _patent(base: Experiment) -> Experiment:
    mixed = _mixed(base)
    training = replace(mixed.settings.training, scores="columns")
    settings = replace(mixed.settings, aggregator="mean", training=training)
    return replace(mixed, settings=settings)


def _narrow(base: Experiment) -> Experiment:
    least = CLASSES[0]
    return replace(base, width=least, classes=(least,))


def _bare(base: Experiment) -> Experiment:
    return replace(_mixed(base), pool=_NO_PSEUDO)


def _coded(codec: Literal["fp32", "int8"]) -> Callable[[Experiment], Experiment]:
    def change(base: Experiment) -> Experiment:
        return replace(_mixed(base), codec=codec)

    return change


def _short_broadcasts(base: Experiment) -> Experiment:
    return replace(_mixed(base), codec="int8", broadcast_codec="int4")


def _capped(base: Experiment) -> Experiment:
    told = base.settings.training
    # Fewer triples a round carry less far: on validation twice the users' rate is better.
    training = replace(told, most_triples=32, user_learning_rate=2 * told.user_learning_rate)
    # A third of the triples in a round: more rounds, and a rate that falls as slowly.
    optimizer = replace(base.settings.optimizer, decay=base.settings.optimizer.decay ** (1 / 2))
    settings = replace(base.settings, training=training, optimizer=optimizer)
    return replace(_mixed(base), settings=settings, epochs=3 * base.epochs, codec="int8")


ROWS = (
    Row(BASELINE, "every device trains all K columns", lambda base: base),
    Row("unequal", "k_i in 8, 16, 32, 64, a quarter each (the default method)", _mixed),
    Row("unequal, patent", "the same fleet, column scores and mean aggregation", _patent),
    Row("all at smallest k", "K = 8, what the weakest device could train alone", _narrow),
    Row("unequal, no pseudo-items", "what hiding the positives costs", _bare),
    Row("unequal, fp32 on the wire", "float32 updates, float16 broadcasts", _coded("fp32")),
    Row("unequal, int8 on the wire", "int8 updates, float16 broadcasts", _coded("int8")),
    Row(
        "unequal, int4 broadcasts",
        "int8 updates, four-bit broadcasts, also to recommend with",
        _short_broadcasts,
    ),
    Row("unequal, capped", "at most 32 triples a round, int8, twice the rounds", _capped),
)


def _experiment(
    data: str,
    split: Literal["test", "validation"],
    seed: int,
    training: BprTraining,
    *,
    epochs: int,
    cohort: int,
    decay: float,
) -> Experiment:
    """``decay`` is that of an epoch, so that it means the same for every size of a cohort."""
    rounds = -(-DEVICES[data] // cohort)
    optimizer = OptimizerSettings(learning_rate=0.0217, decay=decay ** (1 / rounds))
    return Experiment(
        data=data,
        split=split,
        seed=seed,
        width=_WIDTH,
        classes=(_WIDTH,),
        epochs=epochs,
        cohort=cohort,
        spread=0.01,
        # Compared without limits: what the limits of a task's default cost, benchmarks.robust says.
        settings=ScatterSettings(
            optimizer=optimizer, training=training, clip_multiple=0.0, row_multiple=0.0
        ),
        pool=PoolSettings(),
    )
