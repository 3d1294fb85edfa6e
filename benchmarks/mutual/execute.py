"""Carries out one experiment with the real learners, methods and train graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.mutual.domains import Domain, everything, pacs64, rotated_mnist
from benchmarks.mutual.experiment import DeviceScore, Experiment, Outcome
from benchmarks.mutual.fleets import ArtifactCache, make_fleet
from device_sdk import Trainer
from device_sdk.methods.local_steps import predict_all

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


_OUTPUT = "probabilities"


class Scoreboard:
    """Keeps, for each device, the test scores of its best round by validation."""

    def __init__(self, domains: Sequence[Domain]) -> None:
        self._validation = everything(domains, "validation")
        self._test = everything(domains, "test")
        self._owner = np.repeat(np.arange(len(domains)), [len(one.test["y"]) for one in domains])
        self._best: dict[int, DeviceScore] = {}
        self.curve: list[float] = []

    def look(self, round_id: int, trainers: Sequence[Trainer]) -> None:
        """Score all devices' models; one trainer given several times is looked at once.

        Test samples are predicted where validation is at its best so far, and play no part in that.
        """
        seen: dict[int, tuple[float, NDArray[np.bool_] | None]] = {}
        found = []
        for device, trainer in enumerate(trainers):
            best = self._best.get(device)
            validation, right = seen.get(id(trainer), (-1.0, None))
            if validation < 0:
                validation = 100 * float(np.mean(_right(trainer, self._validation)))
            if best is None or validation > best.validation:
                if right is None:
                    right = _right(trainer, self._test)
                own = self._owner == device
                self._best[device] = DeviceScore(
                    round_id,
                    validation,
                    acc=100 * float(right.mean()),
                    bwt=100 * float(right[own].mean()),
                    fwt=100 * float(right[~own].mean()),
                )
            seen[id(trainer)] = (validation, right)
            found.append(validation)
        self.curve.append(float(np.mean(found)))

    @property
    def scores(self) -> tuple[DeviceScore, ...]:
        """By device."""
        return tuple(self._best[device] for device in sorted(self._best))


def _right(trainer: Trainer, samples: dict[str, NDArray[np.generic]]) -> NDArray[np.bool_]:
    predicted = predict_all(trainer, {"x": samples["x"]}, _OUTPUT).argmax(axis=1)
    right: NDArray[np.bool_] = predicted == samples["y"]
    return right
