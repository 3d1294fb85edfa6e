"""What a run found, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.distill.experiment import Experiment
from benchmarks.outcomes import OutcomeFolder
from benchmarks.recommendation.click_metrics import ClickQuality

GLOBAL = "global"
"""All devices' test samples together, each predicted by its own device's model."""


@dataclass(frozen=True, slots=True)
class Point:
    """After a round.

    ``validation_loss``: cross-entropy over all devices' validation samples. ``seconds``: processor
    time that training has taken a device so far, in the mean. ``quality``: on test samples, by
    device and ``GLOBAL``; empty where an earlier round was better on validation. ``switched``: the
    share of devices whose segmented optimizer takes plain steps by now.
    """

    round_id: int
    validation_loss: float
    seconds: float
    quality: dict[str, ClickQuality]
    switched: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The whole run, and the bytes of a round: a device's sealed update, and the broadcast."""

    curve: tuple[Point, ...]
    up_bytes: float
    down_bytes: float
    parameters: int

    @property
    def best(self) -> Point:
        """The round that validation picks; the first of equals."""
        return min(self.curve, key=lambda point: point.validation_loss)

    def seconds_to(self, loss: float) -> float | None:
        """Training time until the validation loss first was ``loss``, straight lines between
        rounds; None where it never was."""
        return self._until(loss, [point.seconds for point in self.curve])

    def rounds_to(self, loss: float) -> float | None:
        """As ``seconds_to``, in rounds: the same on a busy machine."""
        return self._until(loss, [float(point.round_id) for point in self.curve])

    def _until(self, loss: float, spent: list[float]) -> float | None:
        for place, point in enumerate(self.curve):
            if point.validation_loss <= loss:
                if place == 0:
                    return spent[0]
                before = self.curve[place - 1].validation_loss
                part = (before - loss) / (before - point.validation_loss)
                return spent[place - 1] + part * (spent[place] - spent[place - 1])
        return None


class OutcomeStore(OutcomeFolder[Experiment, Outcome]):
    """Outcomes of this benchmark."""

    def prefix(self, run: Experiment) -> str:
        """The method."""
        return run.method

    def decoded(self, fields: dict[str, Any]) -> Outcome:
        """The outcome with its points, and the quality in them."""
        points = []
        for point in fields.pop("curve"):
            quality = {name: ClickQuality(**one) for name, one in point.pop("quality").items()}
            points.append(Point(quality=quality, **point))
        return Outcome(curve=tuple(points), **fields)
