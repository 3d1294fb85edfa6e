"""A run as data, and the rows, whose runs are by data, split and seed.

BPR's settings by hand were chosen on validation items.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from aggregator.methods.least_squares import LeastSquaresSettings
from aggregator.methods.scatter import ScatterSettings
from aggregator.methods.server_optimizer import OptimizerSettings
from benchmarks.channels import BroadcastCodec, UpdateCodec
from benchmarks.harness import Row
from benchmarks.recommendation.split import SplitKind
from device_sdk.methods.scatter.contract import BprTraining
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.wire.arrays.sparse import MAX_WIDTH

_PLAIN_BROADCASTS = "float16"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run of scatter aggregation over one virtual device a user.

    Attributes:
        data: ``ml-100k`` or ``ml-1m``.
        split: ``test``, trained on all training items; or ``validation``, which holds one of them
            out and is the only one that settings may be chosen on.
        seed: of the whole run. Runs that share it share fleet classes, cohorts and first matrices
            as far as their shapes allow, which is what makes differences paired.
        width: K.
        classes: k_i of the capacity classes, in equal shares.
        epochs: full passes over the fleet.
        cohort: devices a round; 0 for all.
        spread: standard deviation of the first item matrix.
        codec: how updates travel; ``direct`` hands arrays over, broadcasts' too.
        broadcast_codec: how broadcasts travel. Other than float16, devices are also evaluated with
            what they received.
        every: epochs between evaluations. What a run of test items shows on its way says how soon
            it is there, and chooses nothing.
    """

    data: str
    split: Literal["test", "validation"]
    seed: int
    width: int
    classes: tuple[int, ...]
    epochs: int
    cohort: int = 256
    spread: float = 0.01
    codec: UpdateCodec = "direct"
    every: int = 10
    settings: ScatterSettings = field(default_factory=ScatterSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    broadcast_codec: BroadcastCodec = "float16"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.width < 1 or not self.classes or self.every < 1:
            raise ValueError("an experiment needs epochs, columns and at least one capacity class")
        if self.codec == "direct" and self.broadcast_codec != _PLAIN_BROADCASTS:
            raise ValueError(
                f"broadcast_codec is {self.broadcast_codec!r} and codec 'direct', which encodes "
                "nothing; expected a codec for updates such as 'int8'"
            )


@dataclass(frozen=True, slots=True)
class Point:
    """Quality after so many rounds: among all items, and of 99 negatives."""

    rounds: int
    full_hit_ratio: float
    full_ndcg: float
    hit_ratio: float
    ndcg: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Quality over the run and what it cost.

    ``share`` is that of the devices in a round; ``by_class`` NDCG@10 among all items by k_i at the
    end; ``update_bytes`` the mean sealed size of an update (0 where the updates were handed over
    unencoded); ``device_seconds`` the processor time of a device's round; ``round_seconds`` the
    wall-clock time of a round of all, which is simulated.
    """

    curve: tuple[Point, ...]
    share: float
    by_class: dict[str, float]
    update_rows: float
    update_bytes: float
    device_seconds: float
    round_seconds: float

    @property
    def last(self) -> Point:
        """Quality at the end."""
        return self.curve[-1]

    @property
    def enough(self) -> Point:
        """The first with 95 % of the quality at the end, by NDCG@10 among all items."""
        return next(at for at in self.curve if at.full_ndcg >= 0.95 * self.last.full_ndcg)


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
