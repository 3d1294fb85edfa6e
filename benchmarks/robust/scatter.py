"""Scatter aggregation's part: ML-100K's fleet of a device a user, attackers and defences."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.scatter import ScatterMethod, initial_items
from benchmarks.channels import ScatterChannel
from benchmarks.harness import data_folder
from benchmarks.recommendation.metrics import quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut, load_split_of
from benchmarks.robust.attacks import (
    ATTACKS,
    SHARES,
    STRENGTH,
    AnyValue,
    Attack,
    hostile_devices,
    noise_like,
    unpopular_item,
)
from benchmarks.robust.suite import (
    DEFAULT,
    UNPROTECTED,
    Found,
    Option,
    SplitKind,
    Suite,
    Trial,
    change_table,
    changed,
    promotion_table,
    single_table,
)
from benchmarks.scatter.execute import open_step
from benchmarks.scatter.experiment import Experiment, preset, unequal
from benchmarks.simulation import Simulation, mixed_columns, scatter_fleet
from device_sdk.methods.learner import Learner, State
from device_sdk.methods.scatter.factor_step import FactorStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.wire.arrays.exchange import Broadcast, Update


@dataclass(frozen=True, slots=True)
class Outcome:
    """Keyed by the share of devices that are hostile; a clean run has all shares, and 0.

    Attributes:
        hit_ratio: HR@10 of the honest devices' users, with the given negatives.
        exposure: share of those users, who do not know the promoted item, that have it among
            their ten best of the whole catalogue.
        epoch_seconds: mean wall-clock time of an epoch.
        most_outliers: updates that were left out in the round in which most were.
    """

    hit_ratio: Mapping[str, float]
    exposure: Mapping[str, float]
    epoch_seconds: float
    most_outliers: float = 0.0


_ADMIRED = 10


class HostileLearner(Learner):
    """Trains as an honest device would, and sends something else.

    ``flip`` sends ten times the opposite. ``noise`` sends normal noise of ten times the norm, in
    the same rows. ``promotion`` sends the honest update, but for one row: ``item`` is pushed
    towards the mean of the ten items that the device's own user likes best, ten times as hard as
    the update's largest row. ``patient`` pushes as hard as that row and no harder, so that nothing
    about the update's sizes is unusual.

    Args:
        honest: the device's real learner, of one user.
        attack: what is done to its updates.
        item: row to promote.
        rng: draws the noise.
    """

    def __init__(
        self, honest: ScatterLearner, attack: Attack, item: int, rng: np.random.Generator
    ) -> None:
        self._honest = honest
        self._attack = attack
        self._item = item
        self._rng = rng

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`device_sdk.methods.learner.Learner`."""
        update = self._honest.train(broadcast)
        if not len(update.tensors["rows"]):
            return update
        if self._attack == "flip":
            tensors = {**update.tensors, "values": update.tensors["values"] * -STRENGTH}
        elif self._attack == "noise":
            tensors = {**update.tensors, "values": noise_like(update.tensors["values"], self._rng)}
        else:
            strength = np.float32(1.0) if self._attack == "patient" else STRENGTH
            tensors = self._promoting(update.tensors, broadcast.tensors["items"], strength)
        return replace(update, tensors=tensors)

    def _promoting(
        self, tensors: State, items: NDArray[Any], strength: np.float32
    ) -> dict[str, NDArray[Any]]:
        rows, columns, values = tensors["rows"], tensors["columns"], tensors["values"]
        known = items.astype(np.float32)
        best = np.argsort(known @ self._honest.users[0])[-_ADMIRED:]
        towards = known[best].mean(axis=0)[columns]
        size = strength * np.linalg.norm(values, axis=1).max()
        # The server descends: a negative gradient moves the row towards the goal.
        push = -size * towards / max(float(np.linalg.norm(towards)), 1e-12)
        place = int(np.searchsorted(rows, self._item))
        if place == len(rows) or rows[place] != self._item:
            rows = np.insert(rows, place, self._item)
            values = np.insert(values, place, 0, axis=0)
        values = values.copy()
        values[place] = push
        return {"rows": rows, "columns": columns, "values": values.astype(np.float32)}


Floats = NDArray[np.float32]


def execute(
    trial: Trial[Experiment], split: LeaveOneOut, step: FactorStep, progress: Callable[[str], None]
) -> Outcome:
    """Train and evaluate; ``progress`` is called with a line of text after each epoch.

    Every trial of a seed has the same fleet, cohorts and first matrix as the same seed of
    ``benchmarks.scatter``, the same order in which devices turn hostile and the same item to
    promote: differences are paired.
    """
    experiment = trial.experiment
    dealing, start, cohorts, fleet, coding = np.random.SeedSequence(experiment.seed).spawn(5)
    turning, choosing, noise = np.random.SeedSequence([experiment.seed, 1]).spawn(3)
    columns = mixed_columns(split.users, experiment.classes, np.random.default_rng(dealing))
    honest = scatter_fleet([[rows] for rows in split.train], columns, step, fleet, experiment.pool)
    order = np.random.default_rng(turning).permutation(split.users)
    known = np.bincount(np.concatenate(split.train), minlength=split.items)
    item = unpopular_item(known, np.random.default_rng(choosing))
    learners: list[ScatterLearner | HostileLearner | AnyValue] = list(honest)
    always: tuple[int, ...] = ()
    if trial.attack is not None and trial.magnitude:
        (device,) = hostile_devices(order, trial.share).tolist()
        learners[device] = AnyValue(
            honest[device], trial.attack, trial.magnitude, np.random.default_rng(noise)
        )
        always = (device,)
    elif trial.attack is not None:
        hostile = hostile_devices(order, trial.share)
        for device, seed in zip(hostile.tolist(), noise.spawn(len(hostile)), strict=True):
            learners[device] = HostileLearner(
                honest[device], trial.attack, item, np.random.default_rng(seed)
            )
    first = initial_items(
        split.items, experiment.width, experiment.spread, np.random.default_rng(start)
    )
    method = ScatterMethod(first, experiment.settings)
    channel = ScatterChannel(experiment.codec, np.random.default_rng(coding))
    simulation = Simulation(method, learners, np.random.default_rng(cohorts), channel)
    most_outliers = 0.0
    began = time.perf_counter()
    for epoch in range(1, experiment.epochs + 1):
        for summary in simulation.epoch(experiment.cohort or split.users, always):
            most_outliers = max(most_outliers, summary.metrics.get("outliers", 0.0))
        progress(
            f"epoch {epoch}/{experiment.epochs}, {(time.perf_counter() - began) / epoch:.1f} s each"
        )
    spent = time.perf_counter() - began
    if simulation.failures:
        raise RuntimeError(f"devices failed or were refused: {simulation.failures}")
    users = np.concatenate([learner.users for learner in honest])
    ranks = sampled_ranks(users, method.items, split)
    sees = exposure(users, method.items, split, item)
    hit_ratio, exposed = {}, {}
    clean = (0.0, 1 / split.users, *SHARES)
    for share in clean if trial.attack is None else (trial.share,):
        rest = np.setdiff1d(np.arange(split.users), hostile_devices(order, share))
        hit_ratio[str(share)] = quality(ranks[rest]).hit_ratio
        exposed[str(share)] = float(np.nanmean(sees[rest]))
    progress(f"HR@10 {hit_ratio}, exposure {exposed}, {spent:.0f} s")
    return Outcome(hit_ratio, exposed, spent / experiment.epochs, most_outliers)


def exposure(users: Floats, items: Floats, split: LeaveOneOut, item: int, n: int = 10) -> Floats:
    """1 where ``item`` is among a user's ``n`` best unknown items, 0 where not, NaN where the user
    knows it: float32 [users]."""
    found = np.empty(len(users), dtype=np.float32)
    for user, known in enumerate(split.train):
        scores = items @ users[user]
        wanted = scores[item]
        scores[known] = -np.inf
        found[user] = np.nan if item in known else float(np.count_nonzero(scores > wanted) < n)
    return found


RECOMMENDED = "guarded"
_DATA = "ml-100k"

OPTIONS = (
    Option(UNPROTECTED, "no protection", lambda base: base),
    Option("clip", "norms up to 4 running medians", changed(clip_multiple=4.0)),
    Option(
        DEFAULT,
        "norms up to 4 running medians, rows up to 16 (a task's default)",
        changed(clip_multiple=4.0, row_multiple=16.0),
    ),
    Option("rows", "rows up to 6 running medians", changed(row_multiple=6.0)),
    Option(
        RECOMMENDED,
        "updates out of line by 3 left out, items' vectors up to 1.25 (recommended)",
        changed(outlier_multiple=3.0, item_multiple=1.25),
    ),
    Option(
        "trimmed",
        "rows up to 6, and a tenth trimmed at either end of every cell",
        changed(row_multiple=6.0, robust="trimmed", trim_share=0.1),
    ),
    Option(
        "median",
        "rows up to 6, and the median of those who touched a cell",
        changed(row_multiple=6.0, robust="median"),
    ),
)


class ScatterSuite(Suite[Experiment, Outcome]):
    """Loads the data and the train graph once, when the first run needs them.

    Args:
        root: the data folder; None for the default one.
        artifact: another factorisation artifact's folder.
    """

    options = OPTIONS
    attacks = ATTACKS
    devices = 943
    outcome = Outcome

    def __init__(self, root: Path | None, artifact: Path | None) -> None:
        self._root = root
        self._artifact = artifact
        self._splits: dict[SplitKind, LeaveOneOut] = {}
        self._step: FactorStep | None = None

    def experiment(self, split: SplitKind, seed: int, option: Option, rounds: int) -> Experiment:
        """See :func:`base_experiment`."""
        return base_experiment(split, seed, option, rounds)

    def run(self, trial: Trial[Experiment], progress: Callable[[str], None]) -> Outcome:
        """See :class:`Suite`."""
        kind = trial.experiment.split
        if kind not in self._splits:
            root = data_folder(self._root, f"{_DATA}/leave_one_out")
            self._splits[kind] = load_split_of(root, _DATA, kind)
        if self._step is None:
            self._step = open_step(self._artifact)
        return execute(trial, self._splits[kind], self._step, progress)

    def single_table(self, found: Found[Outcome]) -> str:
        """HR@10."""
        share = 1 / self.devices
        return single_table(found, share, lambda one: one.hit_ratio, "HR@10 of the other users")

    def tables(self, found: Found[Outcome], options: Sequence[str]) -> list[str]:
        """HR@10, and who sees the promoted item."""
        return [
            change_table(
                found, options, ATTACKS, lambda one: one.hit_ratio, "HR@10 of honest users"
            ),
            promotion_table(
                found, options, ATTACKS, lambda one: one.exposure, "promoted item in the top 10"
            ),
        ]


def base_experiment(split: SplitKind, seed: int, option: Option, epochs: int) -> Experiment:
    """ML-100K's unequal fleet under ``option``; ``epochs`` 0 for the preset's."""
    found = unequal(preset(_DATA, split, seed))
    found = replace(found, settings=option.change(found.settings))
    return replace(found, epochs=epochs) if epochs else found
