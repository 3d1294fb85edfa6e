"""What a run found, and where it is kept so that a stopped benchmark resumes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.scatter.experiment import Experiment

__all__ = ["Outcome", "OutcomeStore", "Point"]


@dataclass(frozen=True, slots=True)
class Point:
    """Quality at the end of an epoch: of 99 negatives, and among all items."""

    epoch: int
    hit_ratio: float
    ndcg: float
    full_hit_ratio: float
    full_ndcg: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Quality over the run and what it cost.

    ``by_class`` is HR@10 by k_i at the end; ``update_bytes`` the mean sealed size of an update (0
    where the updates were handed over unencoded); ``epoch_seconds`` the mean wall-clock time.
    """

    curve: tuple[Point, ...]
    by_class: dict[str, float]
    update_rows: float
    update_bytes: float
    epoch_seconds: float

    @property
    def last(self) -> Point:
        """Quality at the end."""
        return self.curve[-1]


class OutcomeStore:
    """One JSON file an experiment in ``folder``, which is made when needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, experiment: Experiment) -> Outcome | None:
        """The stored outcome, or None where the experiment has not been run."""
        path = self._path(experiment)
        if not path.exists():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))["outcome"]
        curve = tuple(Point(**point) for point in found.pop("curve"))
        return Outcome(curve=curve, **found)

    def save(self, experiment: Experiment, outcome: Outcome) -> None:
        """Write the outcome whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(experiment)
        content = {"experiment": asdict(experiment), "outcome": asdict(outcome)}
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content, indent=1, sort_keys=True), encoding="utf-8")
        partial.replace(path)

    def _path(self, experiment: Experiment) -> Path:
        return self._folder / f"{experiment.data}-{experiment.key}.json"
