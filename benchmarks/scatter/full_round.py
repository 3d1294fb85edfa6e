"""Time and memory of one round in which all 6,040 devices of ML-1M take part."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aggregator.methods.scatter.method import ScatterMethod, initial_items
from benchmarks.recommendation.given_splits import load_split
from benchmarks.simulator import Simulation, scatter_fleet
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.factor_step import FactorStep, TrainerStep
from device_sdk.trainer import Trainer


def open_step(artifact: Path | None) -> FactorStep:
    """The train graph on one CPU thread: of ``artifact``, or of the one that is installed."""
    folder = artifact if artifact is not None else packaged_artifact()
    return TrainerStep(Trainer(folder, providers="cpu", threads=1))


def measure_full_round(root: Path, artifact: Path | None, *, width: int) -> str:
    """A sentence with seconds and peak resident memory, the data set's loading apart.

    In the first round the devices also prepare their triples and make their users' vectors. Much
    less processor time than wall-clock time says that other programs were busy.
    """
    step = open_step(artifact)
    split = load_split(root, "ml-1m")
    seeds = np.random.SeedSequence(0)
    columns = np.full(split.users, width, dtype=np.int64)
    fleet = scatter_fleet([[rows] for rows in split.train], columns, step, seeds)
    method = ScatterMethod(initial_items(split.items, width, 0.1, np.random.default_rng(0)))
    simulation = Simulation(method, fleet, np.random.default_rng(0))
    seconds, of_processor = [], []
    for _ in range(3):
        began, began_working = time.perf_counter(), time.process_time()
        summary = simulation.round()
        seconds.append(time.perf_counter() - began)
        of_processor.append(time.process_time() - began_working)
    return (
        f"one round of {summary.participants} devices, K = {width}: {_listed(seconds)} s (three "
        f"rounds; {_listed(of_processor)} s of processor time), peak {_peak_bytes() / 1e6:.0f} MB "
        "resident"
    )


def _listed(seconds: Sequence[float]) -> str:
    return ", ".join(f"{one:.1f}" for one in seconds)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
