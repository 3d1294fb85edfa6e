"""What a run of scatter aggregation found, and how it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.outcomes import OutcomeFolder
from benchmarks.robust.trial import Trial
from benchmarks.scatter.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Outcome:
    """Keyed by the share of devices that are hostile; a clean run has all shares, and 0.

    Attributes:
        hit_ratio: HR@10 of the honest devices' users, with the given negatives.
        exposure: share of those users, who do not know the promoted item, that have it among
            their ten best of the whole catalogue.
        epoch_seconds: mean wall-clock time of an epoch.
    """

    hit_ratio: Mapping[str, float]
    exposure: Mapping[str, float]
    epoch_seconds: float


class OutcomeStore(OutcomeFolder[Trial[Experiment], Outcome]):
    """Outcomes of scatter aggregation."""

    def prefix(self, run: Trial[Experiment]) -> str:
        """The data set."""
        return run.experiment.data

    def decoded(self, fields: dict[str, Any]) -> Outcome:
        """The outcome."""
        return Outcome(**fields)

    def described(self, run: Trial[Experiment]) -> dict[str, Any]:
        """The trial, experiment and all."""
        return {"trial": asdict(run)}
