"""One round's work on the device: what goes into it and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from device_sdk.home.model_store import CapabilityRow
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.publish.catalogue import Catalogue
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.task_messages import TaskTerms

RECEIPT_METHODS = frozenset({"teacher_logits"})
"""Methods whose learner is a :class:`~device_sdk.methods.learner.ReceiptLearner`."""


class Declined(Exception):
    """The device takes no part in this round; the message says why."""


@dataclass(frozen=True, slots=True)
class LocalArtifact:
    """An artifact that is on this device. ``name`` is for people.

    ``companion``: folder of the artifact that goes with it (attention's meta-network), if any.
    """

    artifact_id: bytes
    name: str
    folder: Path
    companion: Path | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TrainingJob:
    """A round that was fetched whole. ``catalogue``: None for a task without one.

    ``artifacts``: those of the task that this device takes, smallest first; at least one.
    """

    manifest: RoundManifest
    terms: TaskTerms
    broadcast: Broadcast
    catalogue: Catalogue | None
    artifacts: tuple[LocalArtifact, ...]

    @property
    def artifact(self) -> Path:
        """The folder of the smallest artifact."""
        return self.artifacts[0].folder


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRound:
    """Everything that one commit has to hold. ``seconds``: how long the training took.

    Attributes:
        k: the columns trained, or the artifact's place among the task's, 1 for the smallest.
        artifact: what was trained, where the task offers a choice and the state belongs to one.
        model: what to predict with from now on; None: the broadcast's own arrays.
    """

    k: int
    body: bytes
    learner_state: Mapping[str, NDArray[Any]]
    capability: CapabilityRow | None
    seconds: float
    artifact: LocalArtifact | None = None
    model: Mapping[str, NDArray[Any]] | None = None


class RoundTrainer(Protocol):
    """The device's half of a method, with its data: trains one round, and stores nothing."""

    def train(self, job: TrainingJob) -> TrainedRound:
        """Raises :class:`Declined`, or any error; the round then ends without an update."""


@runtime_checkable
class FetchingTrainer(Protocol):
    """A trainer whose learner may need some of a round's attachments."""

    def wants(self, job: TrainingJob) -> Sequence[str]:
        """Names out of ``job.broadcast.offered`` to be fetched before ``train`` is called.

        Asked only where something is offered. Raises as ``train`` does.
        """


@runtime_checkable
class AdoptingTrainer(Protocol):
    """A trainer whose model may be replaced by the task's last version, once its rounds are over.

    ``job.artifacts`` then holds those that are on the device.
    """

    def adopt(self, job: TrainingJob) -> Mapping[str, NDArray[Any]] | None:
        """The model to predict with from now on; None to keep the device's own."""
