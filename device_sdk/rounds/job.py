"""One round's work on the device: what goes into it and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from device_sdk.home.model_store import CapabilityRow
from device_sdk.wire.catalogue import Catalogue
from device_sdk.wire.exchange import Broadcast
from device_sdk.wire.manifest import Manifest
from device_sdk.wire.task_messages import TaskTerms

__all__ = ["Declined", "RoundTrainer", "TrainedRound", "TrainingJob"]


class Declined(Exception):
    """The device takes no part in this round; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingJob:
    """A round that was fetched whole. ``catalogue``: None for a task without one."""

    manifest: Manifest
    terms: TaskTerms
    broadcast: Broadcast
    catalogue: Catalogue | None
    artifact: Path


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRound:
    """Everything that one commit has to hold. ``seconds``: how long the training took."""

    k: int
    body: bytes
    learner_state: Mapping[str, NDArray[Any]]
    capability: CapabilityRow | None
    seconds: float


class RoundTrainer(Protocol):
    """The device's half of a method, with its data: trains one round, and stores nothing."""

    def train(self, job: TrainingJob) -> TrainedRound:
        """Raises :class:`Declined`, or any error; the round then ends without an update."""
