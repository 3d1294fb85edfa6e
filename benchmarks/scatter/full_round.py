"""Time and memory of one round in which all 6,040 devices of ML-1M take part."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import numpy as np

from aggregator.methods.scatter import ScatterMethod, initial_items
from benchmarks.recommendation.given_splits import load_split
from benchmarks.simulator import Simulation, scatter_fleet
from device_sdk.factorisation import packaged_artifact
from device_sdk.learners.factor_step import FactorStep, TrainerStep
from device_sdk.trainer import Trainer

__all__ = ["measure_full_round", "open_step"]


def open_step(artifact: Path | None) -> FactorStep:
    """The train graph on one CPU thread: of ``artifact``, or of the one that is installed."""
    folder = artifact if artifact is not None else packaged_artifact()
    return TrainerStep(Trainer(folder, providers="cpu", threads=1))


def measure_full_round(root: Path, artifact: Path | None, *, width: int) -> str:
    """A sentence with seconds and peak resident memory, the data set's loading apart."""
    step = open_step(artifact)
    split = load_split(root, "ml-1m")
    seeds = np.random.SeedSequence(0)
    columns = np.full(split.users, width, dtype=np.int64)
    fleet = scatter_fleet([[rows] for rows in split.train], columns, step, seeds)
    method = ScatterMethod(initial_items(split.items, width, 0.1, np.random.default_rng(0)))
    simulation = Simulation(method, fleet, np.random.default_rng(0))
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        summary = simulation.round()
        seconds.append(time.perf_counter() - began)
    listed = ", ".join(f"{one:.1f}" for one in seconds)
    return (
        f"one round of {summary.participants} devices, K = {width}: {listed} s (three rounds), "
        f"peak {_peak_bytes() / 1e6:.0f} MB resident"
    )


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
