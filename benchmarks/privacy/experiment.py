"""One measured run, as data: what it does and what it found; and the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.harness import Row
from benchmarks.privacy.attack import Judgement
from benchmarks.scatter.experiment import Experiment, least_squares, preset
from device_sdk.methods.scatter.triples import PoolSettings

DEFAULT = "least squares"
"""The row that the others' accuracy is compared with, seed by seed."""

Disguise = Literal["none", "equal", "noise"]


@dataclass(frozen=True, slots=True)
class Run:
    """A fleet that trains and is attacked.

    Attributes:
        experiment: how it trains, on a validation split.
        users: how many share a device.
        disguise: what a device does to its update before it is sent: ``equal`` gives all rows the
            same length, ``noise`` adds normal noise to each row, ``noise_multiple`` times as long.
        noise_multiple: see there; 0 for other disguises.
    """

    experiment: Experiment
    users: int = 1
    disguise: Disguise = "none"
    noise_multiple: float = 0.0

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ValueError(f"{self.users} users share a device; expected at least 1")
        if (self.disguise == "noise") != (self.noise_multiple > 0):
            raise ValueError(
                f"disguise {self.disguise!r} does not go with a noise multiple of "
                f"{self.noise_multiple}"
            )


def _least_squares(change: Callable[[Run], Run]) -> Callable[[int, int], Run]:
    """All devices at K = 64 unless ``change`` says otherwise; of a seed, and of BPR's epochs."""

    def make(seed: int, epochs: int) -> Run:
        base = least_squares("ml-100k", "validation", seed)
        return change(Run(replace(base, every=base.epochs)))

    return make


def _bpr(change: Callable[[Run], Run]) -> Callable[[int, int], Run]:
    """Likewise."""

    def make(seed: int, epochs: int) -> Run:
        base = preset("ml-100k", "validation", seed)
        return change(Run(replace(base, epochs=epochs, every=epochs)))

    return make


def _pool(pseudo_per_positive: float, weight: float) -> Callable[[Run], Run]:
    def change(base: Run) -> Run:
        pool = PoolSettings(pseudo_per_positive, weight)
        return replace(base, experiment=replace(base.experiment, pool=pool))

    return change


def _narrow(base: Run) -> Run:
    return replace(base, experiment=replace(base.experiment, classes=(8,)))


def _shared(base: Run) -> Run:
    # As docs/methods/scatter.md has it for 48 devices.
    settings = base.experiment.settings
    optimizer = replace(settings.optimizer, learning_rate=0.05, decay=0.98)
    training = replace(settings.training, user_learning_rate=1.0)
    settings = replace(settings, optimizer=optimizer, training=training)
    experiment = replace(base.experiment, settings=settings, cohort=48)
    return replace(base, experiment=experiment, users=20)


def _itself(base: Run) -> Run:
    return base


ROWS = (
    Row(DEFAULT, "untouched defaults, no pseudo-items", _least_squares(_itself)),
    Row("..., weight 1", "half a pseudo-item a like, of weight 1", _least_squares(_pool(0.5, 1.0))),
    Row(
        "..., two a like, weight 1",
        "two pseudo-items a like, of weight 1",
        _least_squares(_pool(2.0, 1.0)),
    ),
    Row(
        "..., 20 users a device",
        "48 devices of about 20 users",
        _least_squares(lambda base: replace(base, users=20)),
    ),
    Row("BPR", "half a pseudo-item a like, of weight 0.1", _bpr(_itself)),
    Row("BPR, weight 1", "half a pseudo-item a like, of weight 1", _bpr(_pool(0.5, 1.0))),
    Row("BPR, 20 users a device", "the same, 48 devices of about 20 users", _bpr(_shared)),
    Row("BPR, no pseudo-items", "true items and negatives alone", _bpr(_pool(0.0, 0.1))),
    Row(
        "BPR, rows of one length",
        "each row of an update scaled to the same length",
        _bpr(lambda base: replace(base, disguise="equal")),
    ),
    Row(
        "BPR, noise on rows",
        "to each row normal noise three times as long",
        _bpr(lambda base: replace(base, disguise="noise", noise_multiple=3.0)),
    ),
    Row("BPR, two a like, weight 1", "two pseudo-items a like, of weight 1", _bpr(_pool(2.0, 1.0))),
    Row("BPR, 8 of 64 columns", "every device trains 8 columns a round", _bpr(_narrow)),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Accuracy at the end, and what the attacks found.

    Attributes:
        hit_ratio: HR@10 on validation items.
        update_rows: mean number of rows of an update.
        first_by_size, first, last, every: the cut by size on each device's first update; the
            learned attack on the first, on the last one, and on all together.
        joined_by_size, joined: both attacks on the first update that is sent by a device which
            joins the trained fleet, by the number of rounds (as text: keys of JSON) that it trained
            before without sending anything. Empty for devices of several users.
    """

    hit_ratio: float
    update_rows: float
    first_by_size: Judgement
    first: Judgement
    last: Judgement
    every: Judgement
    joined_by_size: dict[str, Judgement]
    joined: dict[str, Judgement]
