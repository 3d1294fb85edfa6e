"""What a run over clicks found, and how it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.outcomes import OutcomeFolder
from benchmarks.robust.clicks.experiment import Experiment
from benchmarks.robust.trial import Trial


@dataclass(frozen=True, slots=True)
class Outcome:
    """Keyed by the share of devices that are hostile; a clean run has all shares, and 0.

    Attributes:
        auc: over the honest devices' samples, each predicted by its own device's model.
        loss: their cross-entropy, in nats.
        click: the promoted item's predicted click, mean over up to 100 users who do not know it.
            Empty, as ``exposure`` is, under attacks that promote nothing.
        exposure: share of those users that have it among their ten best of the whole catalogue.
        best_round: the one with the least validation loss, which all of this is of.
        seconds: processor time of the rounds.
    """

    auc: Mapping[str, float]
    loss: Mapping[str, float]
    click: Mapping[str, float]
    exposure: Mapping[str, float]
    best_round: int
    seconds: float


class OutcomeStore(OutcomeFolder[Trial[Experiment], Outcome]):
    """Outcomes of federated averaging and teacher logits."""

    def prefix(self, run: Trial[Experiment]) -> str:
        """The method."""
        return run.experiment.method

    def decoded(self, fields: dict[str, Any]) -> Outcome:
        """The outcome."""
        return Outcome(**fields)

    def described(self, run: Trial[Experiment]) -> dict[str, Any]:
        """The trial, experiment and all."""
        return {"trial": asdict(run)}
