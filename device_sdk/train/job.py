"""One round's work on the device: what goes into it, what comes out of it, and who does it.

The trainer of a task's method is loaded when the first round needs it.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from device_sdk.artifact.errors import ArtifactError
from device_sdk.errors import (
    BatchError,
    CallEnded,
    GraphRunError,
    NonFiniteStep,
    ProviderError,
    RuntimeMissing,
    StateError,
)
from device_sdk.evaluation.report import EvaluationReport
from device_sdk.home.model_store import CapabilityRow
from device_sdk.methods.learner import Declined, Learner, LearnerError
from device_sdk.methods.registry import LEARNERS, MethodError, load_method
from device_sdk.train.evaluate import RoundEvaluation
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.arrays.tensors import BeyondWire
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.catalogue import Catalogue
from device_sdk.wire.publish.manifest import RoundManifest, evaluates, is_control
from device_sdk.wire.publish.report import ItemCount, Reason
from device_sdk.wire.publish.task_messages import TaskTerms
from device_sdk.world import DeviceWorld


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
    ``fresh``: the task was replaced, and its catalogue with it: what was learnt of rows before is
    of other items.
    """

    manifest: RoundManifest
    terms: TaskTerms
    broadcast: Broadcast
    catalogue: Catalogue | None
    artifacts: tuple[LocalArtifact, ...]
    fresh: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRound:
    """Everything that one commit has to hold. ``seconds``: how long the training took.

    Attributes:
        k: the columns trained, or the artifact's place among the task's, 1 for the smallest.
        artifact: what was trained, where the task offers a choice and the state belongs to one.
        model: what to predict with from now on; None: the broadcast's own arrays.
        evaluation: what was found out about the model; None where this device was not to evaluate
            in this round.
        evaluation_detail: why something of it is missing, for this device's owner.
        items: how many were recorded, and how many of them the catalogue does not know.
    """

    k: int
    body: bytes
    learner_state: Mapping[str, NDArray[Any]]
    capability: CapabilityRow | None
    seconds: float
    artifact: LocalArtifact | None = None
    model: Mapping[str, NDArray[Any]] | None = None
    evaluation: EvaluationReport | None = None
    evaluation_detail: str = ""
    items: ItemCount | None = None


class RoundTrainer(ABC):
    """The device's half of a method, with its data: trains one round, and stores nothing."""

    needs_receipts: ClassVar[bool] = False
    """As :attr:`device_sdk.methods.learner.Learner.needs_receipts`."""

    def __init__(self, world: DeviceWorld) -> None:
        self._home, self._options = world.home, world.options
        self._clock, self._rng = world.work_clock, world.rng
        self._device_id = world.membership.grant.device_id
        self._on_mains = world.on_mains

    def affordable_seconds(self, job: TrainingJob) -> float:
        """What a training here is to fit into: the task's time, or half of what the app gives a
        day. Half, so that one that takes longer than it was measured to is not the last. Of the
        control arm's two trainings each has half of it."""
        day, shares = self._options.seconds_a_day, 2 if self.is_control(job) else 1
        found = job.terms.train_seconds if day is None else min(job.terms.train_seconds, day / 2)
        return found / shares

    def is_control(self, job: TrainingJob) -> bool:
        """Whether this device is of the task's control arm, and trains twice."""
        terms = job.terms.evaluation
        return terms is not None and is_control(terms, job.manifest.task, self._device_id)

    def conditions(self, job: TrainingJob) -> str:
        """Under what a choice was measured, as far as it is the same for all methods: where it is
        another, so is the choice. On a battery many machines are slower."""
        power = "" if self._on_mains() else " on battery"
        return f"{self.affordable_seconds(job)}s x{self._options.slowdown}{power}"

    @property
    def affordable_bytes(self) -> int | None:
        """What a round here is to take of the network: likewise half of a day's; None: no bound."""
        day = self._options.bytes_a_day
        return None if day is None else day // 2

    def evaluation(self, job: TrainingJob) -> RoundEvaluation | None:
        """To be filled with what is found out; None where this device does not evaluate in this
        round."""
        terms = job.terms.evaluation
        if terms is None or not evaluates(job.manifest, terms, self._device_id):
            return None
        seconds = terms.time_share * self.affordable_seconds(job)
        # A generator of its own: the training draws what it would draw without an evaluation.
        (rng,) = self._rng.spawn(1)
        stages = 3 if self.is_control(job) else 2
        return RoundEvaluation(terms, seconds, stages, self._clock, rng, self._options.slowdown)

    @abstractmethod
    def train(self, job: TrainingJob) -> TrainedRound:
        """Raises ``Declined``, or any error; the round then ends without an update."""

    def wants(self, job: TrainingJob) -> Sequence[str]:
        """Names out of ``job.broadcast.offered`` to be fetched before ``train`` is called.

        Asked only where something is offered. Raises as ``train`` does.
        """
        return ()

    def adopt(self, job: TrainingJob) -> Mapping[str, NDArray[Any]] | None:
        """The model to predict with from now on; None to keep the device's own.

        Called with the task's last version, once its rounds are over; ``job.artifacts`` then holds
        those that are on the device.
        """
        return None


def learner_class(method: str) -> type[Learner] | type[RoundTrainer]:
    """What the installed package that offers the method trains with.

    A :class:`Learner` trains on the app's arrays. A :class:`RoundTrainer` has its own way with the
    home's data, as scatter's has. Raises :class:`Declined` where there is no such
    method, :class:`RuntimeMissing` where it takes onnxruntime and there is none.
    """
    try:
        found: type[Learner] | type[RoundTrainer]
        found = load_method(LEARNERS, method, Learner, RoundTrainer)
    except MethodError as error:
        if isinstance(error.__cause__, RuntimeMissing):
            raise error.__cause__ from error
        why = f"this device has no learner for the method {method!r}: {error}"
        raise Declined(why, Reason.NO_METHOD) from error
    return found


def needs_receipts(method: str) -> bool:
    """Whether the method's learner must know of each update whether it was counted."""
    try:
        return learner_class(method).needs_receipts
    except (Declined, RuntimeMissing):
        return False  # its training will say so


def load_trainer(world: DeviceWorld, method: str) -> RoundTrainer:
    """The method's trainer. Raises :class:`Declined` where there is no such method.

    onnxruntime takes 20 MB and a tenth of a second: an app that only records and recommends never
    loads it.
    """
    found = learner_class(method)
    if issubclass(found, RoundTrainer):
        return found(world)

    from device_sdk.train.arrays import ArrayTrainer

    return ArrayTrainer(world, found)


# Why a round ended without an update, as one of a few slugs.
# What an error says may quote the app's data, and stays on the device.

_BY_CLASS: tuple[tuple[type[BaseException], Reason], ...] = (
    (CallEnded, Reason.STEP_TOO_LONG),
    (NonFiniteStep, Reason.NOT_FINITE),
    (BeyondWire, Reason.NOT_FINITE),
    (BatchError, Reason.BAD_DATA),
    (MemoryError, Reason.OUT_OF_MEMORY),
    (RuntimeMissing, Reason.NO_RUNTIME),
    (ProviderError, Reason.NO_RUNTIME),
    (ArtifactError, Reason.DOES_NOT_FIT),
    (StateError, Reason.DOES_NOT_FIT),
    (WireError, Reason.BAD_CONTENT),
    (sqlite3.Error, Reason.DISK),
)
# What onnxruntime calls a failed allocation.
_ALLOCATIONS = ("bad_alloc", "allocate memory", "out of memory")


def reason_of(error: BaseException) -> Reason:
    """Of the error that says most: of several that caused each other, the innermost that is known.

    What an app's or a method's own code raised otherwise is ``error``.
    """
    found: Reason | None = None
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        found = _own(link) or found
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return found or Reason.ERROR


def _own(error: BaseException) -> Reason | None:
    if isinstance(error, (Declined, LearnerError)):
        return error.reason
    if isinstance(error, GraphRunError):
        told = str(error).lower()
        memory = any(each in told for each in _ALLOCATIONS)
        return Reason.OUT_OF_MEMORY if memory else Reason.BAD_DATA
    return next((reason for kind, reason in _BY_CLASS if isinstance(error, kind)), None)
