"""What a run found, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.attention.experiment import Experiment
from benchmarks.outcomes import OutcomeFolder


@dataclass(frozen=True, slots=True)
class Point:
    """After a round: means over the devices, of their own validation and test sets.

    ``seconds``: processor time that a device has spent on training so far, mean over the devices.
    """

    round_id: int
    validation: float
    accuracy: float
    precision: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Scores:
    """Whom each device listened to in a round, mean over the parameter groups.

    ``first``: per device its weights over all devices, in the fleet's order; ``second``: per device
    the share of the mixture, the rest being the global model's.
    """

    round_id: int
    first: list[list[float]]
    second: list[float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``curve`` of evaluated rounds; ``by_device`` test accuracy in the best of them.

    ``down_bytes`` and ``up_bytes``: mean a device and round, as encoded, seals and padding apart,
    over the rounds after the warm-up. ``round_seconds``: processor time of a device's round there.
    """

    curve: list[Point]
    by_device: dict[str, float]
    down_bytes: float
    up_bytes: float
    round_seconds: float
    scores: list[Scores] = field(default_factory=list)

    @property
    def best(self) -> Point:
        """The round that validation picks; the first of equals."""
        return max(self.curve, key=lambda point: point.validation)

    def seconds_to(self, accuracy: float) -> float | None:
        """A device's training time until test accuracy first reached this; None where it never
        did."""
        return next((p.seconds for p in self.curve if p.accuracy >= accuracy), None)


class OutcomeStore(OutcomeFolder[Experiment, Outcome]):
    """Outcomes of this benchmark."""

    def prefix(self, run: Experiment) -> str:
        """The data set."""
        return run.data

    def decoded(self, fields: dict[str, Any]) -> Outcome:
        """The outcome with its points and scores."""
        curve = [Point(**point) for point in fields.pop("curve")]
        scores = [Scores(**one) for one in fields.pop("scores")]
        return Outcome(curve=curve, scores=scores, **fields)
