"""Carries out one experiment with the real learners, methods and train graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.mutual.artifacts import ArtifactCache
from benchmarks.mutual.domains import Domain, pacs64, rotated_mnist
from benchmarks.mutual.experiment import Experiment, Outcome
from benchmarks.mutual.fleets import make_fleet
from benchmarks.mutual.scores import Scoreboard

# Images and splits depend on the seed alone, not on the method.
_IMAGES_STREAM = 7


def load_domains(experiment: Experiment, root: Path) -> list[Domain]:
    """The experiment's samples."""
    rng = np.random.default_rng([experiment.seed, _IMAGES_STREAM])
    if experiment.data == "pacs64":
        return pacs64(root, experiment.share, rng)
    return rotated_mnist(root, experiment.share, experiment.split, rng)


def execute(
    experiment: Experiment,
    domains: list[Domain],
    artifacts: ArtifactCache,
    progress: Callable[[str], None],
) -> Outcome:
    """Run the experiment's rounds; ``progress`` is called with one line of text after each."""
    began = time.process_time()
    fleet = make_fleet(experiment, domains, artifacts)
    board = Scoreboard(domains)
    conflicts: list[float] = []
    done = 0
    largest = 0.0
    for round_id in range(1, experiment.rounds + 1):
        before = fleet.bytes_up + fleet.bytes_down
        metrics = fleet.round()
        done = round_id
        if "conflict_share" in metrics:
            conflicts.append(metrics["conflict_share"])
        total = fleet.bytes_up + fleet.bytes_down
        largest = max(largest, total - before)
        last = round_id == experiment.rounds or (
            experiment.most_bytes > 0 and (total + largest) / len(domains) > experiment.most_bytes
        )
        if last or round_id % experiment.every == 0:
            board.look(round_id, fleet.trainers)
        best = max(board.curve, default=0.0)
        progress(f"round {round_id}/{experiment.rounds}, validation {best:.1f} %")
        if last:
            break
    return Outcome(
        devices=board.scores,
        curve=tuple(round(value, 3) for value in board.curve),
        rounds=done,
        bytes_up=fleet.bytes_up / len(domains),
        bytes_down=fleet.bytes_down / len(domains),
        conflict_share=float(np.mean(conflicts)) if conflicts else -1.0,
        seconds=time.process_time() - began,
    )
