"""Carries out one experiment with the real learners and method."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence

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
from device_sdk.wire.arrays.exchange import Broadcast

_TIMED = 100
"""Devices whose rounds are timed, at equal distances."""


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
        step: computes BPR's gradients for every virtual device.
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
        if epoch == experiment.epochs or epoch % experiment.every == 0:
            shown = channel.down(_next_broadcast(method, simulation.rounds))
            users, items = vectors(learners, shown)
            curve.append(_evaluate(simulation.rounds, users, items, split))
        note = f"NDCG@10 {curve[-1].full_ndcg:.4f}" if curve else ""
        progress(f"epoch {epoch}/{experiment.epochs}, {spent / epoch:.1f} s each {note}")
    if simulation.failures:
        raise RuntimeError(f"devices failed or were refused: {simulation.failures}")
    return Outcome(
        curve=tuple(curve),
        share=min(1.0, cohort / split.users),
        by_class=_by_class(users, items, split, columns),
        update_rows=channel.mean_rows,
        update_bytes=channel.mean_bytes,
        device_seconds=_device_seconds(learners, shown),
        round_seconds=spent / simulation.rounds,
    )


def _next_broadcast(method: ScatterMethod, rounds: int) -> Broadcast:
    """What the round after so many would begin with; the method stays as it is."""
    return copy.deepcopy(method).open_round(rounds + 1)


def vectors(
    learners: Sequence[ScatterLearner], shown: Broadcast
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of all users, [users, K], and of all items, [items, K], to recommend with."""
    users = np.concatenate([learner.vectors(shown) for learner in learners])
    return users, shown.tensors["items"].astype(np.float32)


def _evaluate(
    rounds: int, users: NDArray[np.float32], items: NDArray[np.float32], split: LeaveOneOut
) -> Point:
    sampled = quality(sampled_ranks(users, items, split))
    full = quality(full_ranks(users, items, split))
    return Point(rounds, full.hit_ratio, full.ndcg, sampled.hit_ratio, sampled.ndcg)


def _by_class(
    users: NDArray[np.float32],
    items: NDArray[np.float32],
    split: LeaveOneOut,
    columns: NDArray[np.int64],
) -> dict[str, float]:
    ranks = full_ranks(users, items, split)
    return {
        str(count): quality(ranks[columns == count]).ndcg for count in np.unique(columns).tolist()
    }


def _device_seconds(learners: Sequence[ScatterLearner], shown: Broadcast) -> float:
    """Of a device that trains alone; the mean. Their states are others afterwards."""
    timed = learners[:: math.ceil(len(learners) / _TIMED)]
    began = time.process_time()
    for learner in timed:
        learner.train(shown)
    return (time.process_time() - began) / len(timed)
