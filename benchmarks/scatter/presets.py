"""The rows of the table: least squares with untouched defaults, and BPR with settings by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aggregator.methods.least_squares import LeastSquaresSettings
from aggregator.methods.scatter import ScatterSettings
from aggregator.methods.server_optimizer import OptimizerSettings
from benchmarks.recommendation.split import SplitKind
from benchmarks.scatter.experiment import Experiment
from device_sdk.methods.scatter.contract import BprTraining
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.wire.arrays.sparse import MAX_WIDTH

CLASSES = (8, 16, 32, 64)
BASELINE = "least squares"
"""The row that the others are compared with, seed by seed."""

_WIDTH = 128
"""A task's default."""
_TUNED_WIDTH = 64
"""Of BPR's settings by hand."""
DEVICES = {"ml-100k": 943, "ml-1m": 6040}
"""Users of each data set, a device each."""
_PASSES = 10
"""Of least squares: rounds, where all devices come in each."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: what it shows, and its experiment by data, split and seed."""

    name: str
    shows: str
    experiment: Callable[[str, SplitKind, int], Experiment]


def least_squares(data: str, split: SplitKind, seed: int, **other: Any) -> Experiment:
    """Nothing is set but what a row is about."""
    base = Experiment(data, split, seed, _WIDTH, (MAX_WIDTH,), _PASSES, 0, codec="int8", every=1)
    return replace(base, **other)


def _fifth(data: str, split: SplitKind, seed: int, **other: Any) -> Experiment:
    return least_squares(data, split, seed, cohort=math.ceil(DEVICES[data] / 5), **other)


def _wide(width: int) -> Callable[[str, SplitKind, int], Experiment]:
    fixed = ScatterSettings(least_squares=LeastSquaresSettings(most_columns=0))
    return partial(least_squares, width=width, settings=fixed)


# BPR's settings were chosen on validation items.


def preset(data: str, split: SplitKind, seed: int) -> Experiment:
    """BPR on ``data`` with every device at K; raises ValueError for other names.

    Compared without limits of norms: what those of a task's default cost, ``benchmarks.robust``
    says.
    """
    if data not in DEVICES:
        raise ValueError(f"no preset for data set {data!r}; expected 'ml-100k' or 'ml-1m'")
    small = data == "ml-100k"
    epochs, cohort, decay = (40, 128, 0.98) if small else (33, 256, 0.976)
    rounds = -(-DEVICES[data] // cohort)
    settings = ScatterSettings(
        loss="bpr",
        # The decay of an epoch, so that it means the same for every size of a cohort.
        optimizer=OptimizerSettings(learning_rate=0.0217, decay=decay ** (1 / rounds)),
        training=BprTraining(
            user_learning_rate=0.7 if small else 2.0, user_l2=0.01 if small else 0.02
        ),
        clip_multiple=0.0,
        row_multiple=0.0,
    )
    return Experiment(
        *(data, split, seed, _TUNED_WIDTH, (_TUNED_WIDTH,), epochs, cohort),
        settings=settings,
        pool=PoolSettings(pseudo_per_positive=0.5),
    )


def unequal(base: Experiment) -> Experiment:
    """An equal fleet's experiment of BPR with devices of four classes.

    Weak devices move a part of their vectors a round, so such a fleet is at its best later. And a
    column is drawn by 47 % of the devices, so that its mean is noisier: a rate lower by the root of
    that share gains a point of NDCG.
    """
    coverage = sum(CLASSES) / len(CLASSES) / base.width
    optimizer = base.settings.optimizer
    optimizer = replace(optimizer, learning_rate=optimizer.learning_rate * math.sqrt(coverage))
    longer = 2.5 if base.data == "ml-100k" else 2.0
    settings = replace(base.settings, optimizer=optimizer)
    return replace(base, classes=CLASSES, epochs=round(base.epochs * longer), settings=settings)


def _patent(base: Experiment) -> Experiment:
    mixed = unequal(base)
    training = replace(mixed.settings.training, scores="columns")
    return replace(mixed, settings=replace(mixed.settings, aggregator="mean", training=training))


def _tuned(
    change: Callable[[Experiment], Experiment], data: str, split: SplitKind, seed: int
) -> Experiment:
    return replace(change(preset(data, split, seed)), codec="int8", every=2)


ROWS = (
    Row(BASELINE, "untouched defaults, every device trains all columns", least_squares),
    Row(
        "unequal",
        "k_i in 8, 16, 32, 64, a quarter each",
        partial(least_squares, classes=CLASSES),
    ),
    Row("a fifth a round", "a fifth of the devices in each of 50 rounds", _fifth),
    Row(
        "unequal, a fifth a round",
        "the unequal fleet, likewise",
        partial(_fifth, classes=CLASSES),
    ),
    *(
        Row(f"K = {width}", f"{width} columns from the first round to the last", _wide(width))
        for width in (32, 64, 256)
    ),
    Row(
        "BPR, defaults",
        "the patent's loss, as untouched and for as many rounds",
        partial(least_squares, settings=ScatterSettings(loss="bpr")),
    ),
    Row("BPR, tuned", "with rates, decay and passes by hand", partial(_tuned, lambda one: one)),
    Row("BPR, tuned, unequal", "the unequal fleet, likewise", partial(_tuned, unequal)),
    Row(
        "BPR, tuned, patent",
        "the unequal fleet, column scores and mean aggregation",
        partial(_tuned, _patent),
    ),
)
