"""Scatter aggregation's part: ML-100K's fleet of a device a user, attackers and defences."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.scatter import ScatterMethod
from benchmarks.harness import data_folder
from benchmarks.recommendation.metrics import quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut, SplitKind, load_split_of
from benchmarks.robust.suite import (
    ATTACKS,
    DEFAULT,
    UNPROTECTED,
    AnyValue,
    Attack,
    HostileLearner,
    Method,
    Option,
    Outcome,
    Trial,
    hostile_devices,
    unpopular_item,
)
from benchmarks.scatter.experiment import Experiment, open_step, preset, unequal, virtual_fleet
from device_sdk.methods.learner import Learner, State
from device_sdk.methods.scatter.factor_step import FactorStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.wire.arrays.exchange import Broadcast

_DATA = "ml-100k"
_ADMIRED = 10
Floats = NDArray[np.float32]


class HostileScatterLearner(HostileLearner):
    """``promotion`` sends the honest update, but for one row: ``item`` is pushed towards the mean
    of the ten items that the device's own user likes best, ten times as hard as the update's
    largest row. ``patient`` pushes as hard as that row and no harder, so that nothing about the
    update's sizes is unusual."""

    def __init__(
        self, honest: ScatterLearner, attack: Attack, item: int, rng: np.random.Generator
    ) -> None:
        super().__init__(honest, attack, rng)
        self._users = honest
        self._item = item

    def _promoting(
        self, tensors: State, broadcast: Broadcast, strength: np.float32
    ) -> dict[str, NDArray[Any]]:
        rows, columns, values = tensors["rows"], tensors["columns"], tensors["values"]
        known = broadcast.tensors["items"].astype(np.float32)
        best = np.argsort(known @ self._users.users[0])[-_ADMIRED:]
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


def execute(
    trial: Trial[Experiment], split: LeaveOneOut, step: FactorStep, progress: Callable[[str], None]
) -> Outcome:
    """Train and evaluate; ``progress`` is called with a line of text after each epoch.

    Measures are ``hit_ratio``, HR@10 of the honest devices' users with the given negatives; and
    ``exposure``, the share of those users, who do not know the promoted item, that have it among
    their ten best of the whole catalogue. Every trial of a seed has the same fleet, cohorts and
    first matrix as the same seed of ``benchmarks.scatter``, the same order in which devices turn
    hostile and the same item to promote: differences are paired.
    """
    experiment, attack = trial.experiment, trial.attack
    turning, choosing, noise = np.random.SeedSequence([experiment.seed, 1]).spawn(3)
    order = np.random.default_rng(turning).permutation(split.users)
    known = np.bincount(np.concatenate(split.train), minlength=split.items)
    item = unpopular_item(known, np.random.default_rng(choosing))
    hostile = hostile_devices(order, trial.share).tolist()

    def senders(learners: list[ScatterLearner]) -> list[Learner]:
        found: list[Learner] = list(learners)
        if attack is not None and trial.magnitude:
            (device,) = hostile
            rng = np.random.default_rng(noise)
            found[device] = AnyValue(learners[device], attack, trial.magnitude, rng)
        elif attack is not None:
            for device, seed in zip(hostile, noise.spawn(len(hostile)), strict=True):
                rng = np.random.default_rng(seed)
                found[device] = HostileScatterLearner(learners[device], attack, item, rng)
        return found

    fleet = virtual_fleet(
        experiment,
        [[rows] for rows in split.train],
        split.items,
        step,
        lambda first, _: ScatterMethod(first, experiment.settings),
        senders,
    )
    began = time.perf_counter()
    for epoch in fleet.epochs(experiment, hostile if trial.magnitude else ()):
        each = (time.perf_counter() - began) / epoch
        progress(f"epoch {epoch}/{experiment.epochs}, {each:.1f} s each")
    users = np.concatenate([learner.users for learner in fleet.learners])
    ranks = sampled_ranks(users, fleet.method.items, split)
    sees = exposure(users, fleet.method.items, split, item)
    measures: dict[str, dict[str, float]] = {"hit_ratio": {}, "exposure": {}}
    for share in trial.shares(split.users):
        rest = np.setdiff1d(np.arange(split.users), hostile_devices(order, share))
        measures["hit_ratio"][str(share)] = quality(ranks[rest]).hit_ratio
        measures["exposure"][str(share)] = float(np.nanmean(sees[rest]))
    progress(str(measures))
    return Outcome(measures)


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


OPTIONS = (
    Option(UNPROTECTED, "no protection"),
    Option("clip", "norms up to 4 running medians", {"clip_multiple": 4.0}),
    Option(
        DEFAULT,
        "norms up to 4 running medians, rows up to 16 (a task's default)",
        {"clip_multiple": 4.0, "row_multiple": 16.0},
    ),
    Option("rows", "rows up to 6 running medians", {"row_multiple": 6.0}),
    Option(
        "guarded",
        "updates out of line by 3 left out, items' vectors up to 1.25 (recommended)",
        {"outlier_multiple": 3.0, "item_multiple": 1.25},
    ),
    Option(
        "trimmed",
        "rows up to 6, and a tenth trimmed at either end of every cell",
        {"row_multiple": 6.0, "robust": "trimmed", "trim_share": 0.1},
    ),
    Option(
        "median",
        "rows up to 6, and the median of those who touched a cell",
        {"row_multiple": 6.0, "robust": "median"},
    ),
)


def base_experiment(split: SplitKind, seed: int, epochs: int) -> Experiment:
    """ML-100K's unequal fleet without protection; ``epochs`` 0 for the preset's."""
    found = unequal(preset(_DATA, split, seed))
    return replace(found, epochs=epochs) if epochs else found


def _carried_out(
    trial: Trial[Experiment], options: argparse.Namespace, progress: Callable[[str], None]
) -> Outcome:
    root = data_folder(options.root, f"{_DATA}/leave_one_out")
    split = load_split_of(root, _DATA, trial.experiment.split)
    return execute(trial, split, open_step(options.artifact), progress)


METHOD = Method(
    "scatter aggregation: 943 devices of unequal size",
    Experiment,
    OPTIONS,
    ATTACKS,
    943,
    base_experiment,
    _carried_out,
    changes={"hit_ratio": "HR@10 of honest users"},
    promotions={"exposure": "promoted item in the top 10"},
)
