"""What a run found, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.mutual.experiment import Experiment
from benchmarks.outcomes import OutcomeFolder


@dataclass(frozen=True, slots=True)
class DeviceScore:
    """One device's accuracies in percent, of the round that its validation chose.

    ``acc`` on all domains' test samples, ``bwt`` on its own, ``fwt`` on the others' (papers/mafml,
    section 3.2); ``validation`` on all domains' validation samples.
    """

    round: int
    validation: float
    acc: float
    bwt: float
    fwt: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Scores by device, and what they cost.

    ``curve`` is the devices' mean validation accuracy at each look; bytes are a device's mean over
    the whole run, sealed; ``conflict_share`` is NaN-free: -1 where nothing was projected.
    """

    devices: tuple[DeviceScore, ...]
    curve: tuple[float, ...]
    rounds: int
    bytes_up: float
    bytes_down: float
    conflict_share: float
    seconds: float

    @property
    def bytes(self) -> float:
        """A device's, both ways."""
        return self.bytes_up + self.bytes_down

    def mean(self, what: str, leave_out: int = -1) -> float:
        """Over devices, of ``acc``, ``bwt``, ``fwt`` or ``validation``, but one of them."""
        values = [
            float(getattr(score, what))
            for place, score in enumerate(self.devices)
            if place != leave_out
        ]
        return sum(values) / len(values)


class OutcomeStore(OutcomeFolder[Experiment, Outcome]):
    """Outcomes of this benchmark."""

    def prefix(self, run: Experiment) -> str:
        """The data set and the method."""
        return f"{run.data}-{run.method}"

    def decoded(self, fields: dict[str, Any]) -> Outcome:
        """The outcome with its devices' scores."""
        devices = tuple(DeviceScore(**score) for score in fields.pop("devices"))
        return Outcome(devices=devices, curve=tuple(fields.pop("curve")), **fields)
