"""Carries out one experiment with the real learners, method and train graph."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.scatter import ScatterMethod, initial_items
from aggregator.simulate.engine import Simulation
from aggregator.simulate.scatter_fleet import mixed_columns, scatter_fleet
from benchmarks.channels import ScatterChannel
from benchmarks.recommendation.metrics import full_ranks, quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut
from benchmarks.scatter.experiment import Experiment, Outcome, Point
from device_sdk.methods.scatter.factor_step import FactorStep
from device_sdk.methods.scatter.learner import ScatterLearner


def execute(
    experiment: Experiment,
    split: LeaveOneOut,
    step: FactorStep,
    progress: Callable[[str], None],
) -> Outcome:
    """Train for ``experiment.epochs`` and evaluate.

    Args:
        experiment: what to run.
        split: of the data and kind that the experiment names.
        step: computes gradients for every virtual device.
        progress: called with one line of text after each epoch.
    """
    # One stream a purpose: changing one part of an experiment leaves the others' draws alone.
    dealing, start, cohorts, fleet, coding = np.random.SeedSequence(experiment.seed).spawn(5)
    columns = mixed_columns(split.users, experiment.classes, np.random.default_rng(dealing))
    learners = scatter_fleet(
        [[rows] for rows in split.train], columns, step, fleet, experiment.pool
    )
    first = initial_items(
        split.items, experiment.width, experiment.spread, np.random.default_rng(start)
    )
    method = ScatterMethod(first, experiment.settings)
    channel = ScatterChannel(
        experiment.codec, np.random.default_rng(coding), experiment.broadcast_codec
    )
    simulation = Simulation(method, learners, np.random.default_rng(cohorts), channel)
    cohort = experiment.cohort if experiment.cohort else split.users
    curve: list[Point] = []
    spent = 0.0
    for epoch in range(1, experiment.epochs + 1):
        began = time.perf_counter()
        for _ in simulation.epoch(cohort):
            pass
        spent += time.perf_counter() - began
        last = epoch == experiment.epochs
        if last or (experiment.split == "validation" and epoch % experiment.every == 0):
            shown = channel.recommended_with(method.items)
            curve.append(_evaluate(epoch, _vectors(learners), shown, split))
        note = f"HR@10 {curve[-1].hit_ratio:.4f}" if curve else ""
        progress(f"epoch {epoch}/{experiment.epochs}, {spent / epoch:.1f} s each {note}")
    if simulation.failures:
        raise RuntimeError(f"devices failed or were refused: {simulation.failures}")
    return Outcome(
        curve=tuple(curve),
        by_class=_by_class(_vectors(learners), shown, split, columns),
        update_rows=channel.mean_rows,
        update_bytes=channel.mean_bytes,
        epoch_seconds=spent / experiment.epochs,
    )


def _vectors(learners: list[ScatterLearner]) -> NDArray[np.float32]:
    return np.concatenate([learner.users for learner in learners])


def _evaluate(
    epoch: int, users: NDArray[np.float32], items: NDArray[np.float32], split: LeaveOneOut
) -> Point:
    sampled = quality(sampled_ranks(users, items, split))
    full = quality(full_ranks(users, items, split))
    return Point(epoch, sampled.hit_ratio, sampled.ndcg, full.hit_ratio, full.ndcg)


def _by_class(
    users: NDArray[np.float32],
    items: NDArray[np.float32],
    split: LeaveOneOut,
    columns: NDArray[np.int64],
) -> dict[str, float]:
    ranks = sampled_ranks(users, items, split)
    return {
        str(count): quality(ranks[columns == count]).hit_ratio
        for count in np.unique(columns).tolist()
    }
