"""What a run found, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.outcomes import OutcomeFolder
from benchmarks.scatter.experiment import METHOD_REVISION, Experiment


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


class OutcomeStore(OutcomeFolder[Experiment, Outcome]):
    """Outcomes of this benchmark."""

    def prefix(self, run: Experiment) -> str:
        """The data set."""
        return run.data

    def decoded(self, fields: dict[str, Any]) -> Outcome:
        """The outcome with its points."""
        curve = tuple(Point(**point) for point in fields.pop("curve"))
        return Outcome(curve=curve, **fields)

    def described(self, run: Experiment) -> dict[str, Any]:
        """The revision too: two files may differ in nothing else."""
        return {"revision": METHOD_REVISION, **super().described(run)}
