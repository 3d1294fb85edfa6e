"""A run as data: a fleet learns, its aggregator looks; how it is carried out, and the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Row
from benchmarks.privacy.attack import (
    CuriousMethod,
    Judgement,
    Sighting,
    Victim,
    by_learning,
    by_size,
)
from benchmarks.recommendation.metrics import quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut
from benchmarks.scatter.experiment import Experiment, least_squares, preset, vectors, virtual_fleet
from benchmarks.simulation import device_name, mixed_columns, scatter_fleet
from device_sdk.methods.learner import Learner
from device_sdk.methods.scatter.factor_step import FactorStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.wire.arrays.exchange import Broadcast, Update

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


def _many_a_device(base: Run) -> Run:
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
    Row("BPR, 20 users a device", "the same, 48 devices of about 20 users", _bpr(_many_a_device)),
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


Rows = NDArray[np.int64]

_WATCHED = {True: 200, False: 24}
"""How many devices are attacked, by whether they have one user: several take longer to tell apart.
Half of them teach the learned attack, the other half is judged."""

SILENT_ROUNDS = {"bpr": (0, 10), "least-squares": (0,)}
"""Rounds that a joining device trains before it sends anything: of least squares it solves each
anew."""


def execute(
    run: Run,
    split: LeaveOneOut,
    step: FactorStep,
    progress: Callable[[str], None],
) -> Outcome:
    """Train for the run's epochs, and attack.

    Args:
        run: what to run.
        split: a validation split of the data that the run names.
        step: computes gradients for every virtual device.
        progress: called with one line of text after each epoch.
    """
    experiment = run.experiment
    dealing, *_, sharing, watching, joining = np.random.SeedSequence(experiment.seed).spawn(8)
    homes = _shared(split.train, run.users, np.random.default_rng(sharing))
    devices = [[split.train[user] for user in users] for users in homes]
    popularity = np.bincount(
        np.concatenate([np.unique(np.concatenate(rows)) for rows in devices]),
        minlength=split.items,
    ).astype(np.float64)
    order = np.random.default_rng(watching).permutation(len(devices))[: _WATCHED[run.users == 1]]
    names = [device_name(device) for device in order]

    def curious(first: NDArray[np.float32], rng: np.random.Generator) -> CuriousMethod:
        return CuriousMethod(first, experiment.settings, names, popularity, run.users, rng)

    def disguised(learners: list[ScatterLearner]) -> list[DisguisedLearner]:
        seeds = dealing.spawn(len(learners))
        return [
            DisguisedLearner(one, run, np.random.default_rng(seed))
            for one, seed in zip(learners, seeds, strict=True)
        ]

    trained = virtual_fleet(experiment, devices, split.items, step, curious, disguised)
    method, learners = trained.method, trained.learners
    for epoch in trained.epochs(experiment):
        progress(f"epoch {epoch}/{experiment.epochs}")
    victims = [
        _victim(method.seen[name], devices[device], learners[device])
        for name, device in zip(names, order, strict=True)
    ]
    firsts = [Victim(one.seen[:1], one.likes, one.pseudo) for one in victims]
    lasts = [Victim(one.seen[-1:], one.likes, one.pseudo) for one in victims]
    weight = experiment.pool.pseudo_weight
    shown = method.open_round(trained.simulation.rounds + 1)
    joined = _joined(run, method, shown, devices, step, joining, order) if run.users == 1 else {}
    found, items = vectors(learners, shown)
    of_users = np.empty_like(found)
    of_users[np.concatenate(homes)] = found
    return Outcome(
        hit_ratio=quality(sampled_ranks(of_users, items, split)).hit_ratio,
        update_rows=trained.channel.mean_rows,
        first_by_size=by_size(firsts, weight),
        first=by_learning(firsts, popularity),
        last=by_learning(lasts, popularity),
        every=by_learning(victims, popularity),
        joined_by_size={key: by_size(seen, weight) for key, seen in joined.items()},
        joined={key: by_learning(seen, popularity) for key, seen in joined.items()},
    )


def _shared(train: Sequence[Rows], users: int, rng: np.random.Generator) -> list[Rows]:
    """Which users hold each device, ``users`` of them (the last: fewer or as many)."""
    if users == 1:
        return [np.array([user]) for user in range(len(train))]
    order = rng.permutation(len(train))
    return [order[begin : begin + users] for begin in range(0, len(order), users)]


def _victim(seen: Sequence[Sighting], rows: Sequence[Rows], learner: ScatterLearner) -> Victim:
    likes = np.unique(np.concatenate(rows))
    return Victim(seen, likes, np.setdiff1d(learner.state()["pool"], likes))


def _joined(
    run: Run,
    method: CuriousMethod,
    broadcast: Broadcast,
    devices: Sequence[Sequence[Rows]],
    step: FactorStep,
    seeds: np.random.SeedSequence,
    order: Rows,
) -> dict[str, list[Victim]]:
    """New devices with the data of those in ``order``, by how long they trained in silence.

    The item matrix stays as it is: as a fleet's does that has learnt what it can.
    """
    experiment = run.experiment
    found = {}
    for silent in SILENT_ROUNDS[experiment.settings.loss]:
        fleets, disguises = seeds.spawn(2)
        rng = np.random.default_rng(disguises)
        columns = mixed_columns(len(order), experiment.classes, rng)
        data = [devices[device] for device in order]
        victims = []
        for learner, rows in zip(
            scatter_fleet(data, columns, step, fleets, experiment.pool), data, strict=True
        ):
            for _ in range(silent):
                learner.train(broadcast)
            update = DisguisedLearner(learner, run, rng).train(broadcast)
            victims.append(_victim([method.look(update)], rows, learner))
        found[str(silent)] = victims
    return found


class DisguisedLearner(Learner):
    """Passes on what ``learner`` trains, disguised as ``run`` says."""

    def __init__(self, learner: Learner, run: Run, rng: np.random.Generator) -> None:
        self._learner = learner
        self._run = run
        self._rng = rng

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`~device_sdk.methods.learner.Learner`."""
        update = self._learner.train(broadcast)
        if self._run.disguise == "none":
            return update
        values = update.tensors["values"]
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        if self._run.disguise == "equal":
            values = values * (lengths.mean() / np.maximum(lengths, 1e-12))
        elif self._run.disguise == "noise":
            noise = self._rng.standard_normal(values.shape) / np.sqrt(values.shape[1])
            values = values + self._run.noise_multiple * lengths * noise
        return replace(update, tensors={**update.tensors, "values": values.astype(np.float32)})
