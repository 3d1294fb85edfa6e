"""Carries out one trial with the real learners, method and train graph."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.scatter.method import ScatterMethod, initial_items
from benchmarks.recommendation.metrics import quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut
from benchmarks.robust.any_value import AnyValue
from benchmarks.robust.attacks import SHARES, hostile_devices, unpopular_item
from benchmarks.robust.scatter.hostile import HostileLearner
from benchmarks.robust.scatter.outcome import Outcome
from benchmarks.robust.trial import Trial
from benchmarks.scatter.experiment import Experiment
from benchmarks.scatter.measured_channel import MeasuredChannel
from benchmarks.simulator import Simulation, mixed_columns, scatter_fleet
from device_sdk.methods.scatter.factor_step import FactorStep
from device_sdk.methods.scatter.learner import ScatterLearner

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
    channel = MeasuredChannel(experiment.codec, np.random.default_rng(coding))
    simulation = Simulation(method, learners, np.random.default_rng(cohorts), channel)
    began = time.perf_counter()
    for epoch in range(1, experiment.epochs + 1):
        for _ in simulation.epoch(experiment.cohort or split.users, always):
            pass
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
    return Outcome(hit_ratio, exposed, spent / experiment.epochs)


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
