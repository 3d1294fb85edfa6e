"""A round of a method on local arrays: its artifact, its training, its update's body."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.load import read_manifest
from device_sdk.capability.fit import Fit, Request, WorkDone, affordable, choose
from device_sdk.evaluation.report import ALONE
from device_sdk.home.model_store import CapabilityRow
from device_sdk.local_data import LocalData
from device_sdk.methods.learner import (
    Declined,
    Learner,
    LearnerError,
    LearnerParts,
    MovableWork,
    Where,
)
from device_sdk.methods.local_steps import restore_trainer, trainer_state
from device_sdk.methods.state import State
from device_sdk.system.clock import Clock, slowed
from device_sdk.system.printable import in_words
from device_sdk.system.watch import Watch
from device_sdk.train.evaluate import ModelEvaluation, RoundEvaluation, Unmeasured
from device_sdk.train.job import LocalArtifact, RoundTrainer, TrainedRound, TrainingJob
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, encode_update
from device_sdk.wire.arrays.tensors import Codec
from device_sdk.wire.publish.receipts import Verdict
from device_sdk.wire.publish.report import Reason
from device_sdk.wire.publish.task_messages import BROADCAST_CODECS
from device_sdk.world import DeviceWorld

_log = logging.getLogger("tessera.device")

# A Trainer that counts its steps, and that a measurement can stop between two of them.


class OutOfTime(Exception):
    """A measurement's time was over before the round's work was."""


class WatchedTrainer(Trainer):
    """``steps`` counts since it was last set; of these one is taken even past ``stop_at``, which is
    in the clock's seconds."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        clock: Clock,
        *,
        seed: int,
        providers: str = "auto",
        watch: Watch | None = None,
    ) -> None:
        super().__init__(
            directory, providers=providers, threads=1, seed=seed, clock=clock, watch=watch
        )
        self.steps = 0
        self.stop_at = math.inf

    def step(
        self, batch: Mapping[str, NDArray[Any]], *, hyper: Mapping[str, float] | None = None
    ) -> float:
        """As :meth:`device_sdk.trainer.Trainer.step`; raises :class:`OutOfTime` when it is over."""
        if self._clock.now() >= self.stop_at and self.steps:
            raise OutOfTime
        loss = super().step(batch, hyper=hyper)
        self.steps += 1
        return loss


def evaluate_received(
    learner: Learner,
    trainer: Trainer,
    broadcast: Broadcast,
    data: LocalData,
    found: RoundEvaluation,
) -> ModelEvaluation:
    """Evaluates the model received, on a learner that is then thrown away; what comes back
    evaluates the one trained."""
    evaluation = ModelEvaluation(found, trainer.artifact, data.test)
    own, shared = learner.personalises(broadcast), False
    try:
        shared = learner.receive(broadcast)
    except LearnerError as error:
        found.miss(Unmeasured("failed", f"global: {error}"))
    found.stages = max(1, found.stages - 2 + own + shared)
    if shared:
        evaluation.stage("global", trainer)
    elif not own:
        found.miss(Unmeasured("no-model", "the method has no model that it could be asked of"))
    return evaluation


# The control arm: the same steps on a second model, of which nothing is exchanged. What is kept of
# it lies beside the learner's state.

_CONTROL = "second model."
"""A learner may well call its own state ``control.*``, as SCAFFOLD calls its variates."""
_ROUNDS = f"{_CONTROL}rounds"


def apart(state: State) -> tuple[State, State]:
    """A learner's own state, and what the control arm keeps beside it."""
    control = {name: array for name, array in state.items() if name.startswith(_CONTROL)}
    return {name: array for name, array in state.items() if name not in control}, control


def train_control(
    make: Callable[[], tuple[Learner, Trainer]],
    broadcast: Broadcast,
    kept: State,
    evaluation: ModelEvaluation | None,
) -> State:
    """A round of the control arm, evaluated; what of it is to be kept.

    ``make``: a new learner, its trainer at the artifact's own values; it is thrown away. ``kept``:
    what the last such round left, nothing to begin with. Whatever goes wrong is noted, and leaves
    ``kept`` as it is: the device's part in the round is worth more.
    """
    rounds = int(kept.get(_ROUNDS, 0))
    try:
        learner, trainer = make()
        if kept:
            state = {name: array for name, array in kept.items() if name != _ROUNDS}
            restore_trainer(trainer, state, _CONTROL)
        learner.train_alone(broadcast, begins=not kept)
        found = trainer_state(trainer, _CONTROL)
        if not all(np.isfinite(array).all() for array in found.values()):
            raise LearnerError("what it led to is not finite")  # and could not be kept
    except Exception as error:
        _log.warning("the control arm's training failed", exc_info=True)
        if evaluation is not None:
            evaluation.miss(Unmeasured("failed", f"{ALONE}: {in_words(error)}"))
        return kept
    if evaluation is not None:
        evaluation.stage(ALONE, trainer, rounds + 1)
    return {**found, _ROUNDS: np.array(rounds + 1)}


# A trained model as it is kept to predict with: parameters and buffers, without the optimizer.

_KINDS = ("parameter", "buffer")


def model_arrays(trainer: Trainer) -> dict[str, NDArray[Any]]:
    """State tensors of kinds parameter and buffer that are not the artifact's own, by their names:
    copies."""
    kinds = {each.name: each.kind for each in trainer.artifact.state if not each.frozen}
    return {name: array for name, array in trainer.state.items() if kinds.get(name) in _KINDS}


def load_model_arrays(trainer: Trainer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The inverse. Raises StateError where they are of another artifact."""
    trainer.set_state(arrays)


# The very work of a round with one artifact, to be timed.


class ArrayWork:
    """A round on a learner that is thrown away; an :class:`~device_sdk.capability.fit.Option`.

    ``make`` gives the learner as the round would begin with it. ``rehearses``: with the work
    that either end may do, even where this round has none.
    """

    def __init__(
        self,
        artifact: LocalArtifact,
        make: Callable[[], tuple[Learner, WatchedTrainer]],
        broadcast: Broadcast,
        clock: Clock,
        *,
        rehearses: bool = False,
    ) -> None:
        self.name = artifact.name
        self.size = float(read_manifest(artifact.folder).moved_numbers)
        self._make = make
        self._broadcast = broadcast
        self._clock = clock
        self._rehearses = rehearses

    def run(self, most_seconds: float) -> WorkDone:
        """Train one round, at least one step of it; cut short between two steps after
        ``most_seconds``."""
        learner, trainer = self._make()
        trainer.steps = 0
        start = self._clock.now()
        trainer.stop_at = start + most_seconds
        try:
            if self._rehearses:
                learner.rehearse(self._broadcast)
            else:
                learner.train(_readable(self._broadcast, learner))
        except OutOfTime:
            finished = False
        else:
            finished = True
        finally:
            trainer.stop_at = float("inf")
        return WorkDone(self._clock.now() - start, trainer.steps, finished)


def _readable(broadcast: Broadcast, learner: Learner) -> Broadcast:
    """The broadcast with those attachments only that this learner asked for."""
    wanted = set(learner.wants(broadcast))
    kept = {name: each for name, each in broadcast.attachments.items() if name in wanted}
    return replace(broadcast, attachments=kept)


_RECEIPTS = 64
_BYTES_A_NUMBER: Mapping[Codec, float] = {
    Codec.FLOAT32: 4.0,
    Codec.FLOAT16: 2.0,
    Codec.INT8: 1.0,
    Codec.INT4: 0.5,
}


class ArrayTrainer(RoundTrainer):
    """Trains with the app's arrays and the home's learner state; see :class:`RoundTrainer`.

    Each round makes the learner anew from what the last commit left, so a round that ended
    without a commit has left nothing.
    """

    def __init__(self, world: DeviceWorld, kind: type[Learner]) -> None:
        super().__init__(world)
        self._source, self._kind, self._watch = world.source, kind, world.watch
        self._sender = world.membership.grant.device_id.hex()
        self._trainers: dict[Path, WatchedTrainer] = {}
        self._measured: dict[str, CapabilityRow] = {}
        """By task, the choice that a round's attachments were fetched for."""

    def wants(self, job: TrainingJob) -> Sequence[str]:
        """What the chosen artifact's learner wants; before a choice that takes attachments to make,
        what any of them does."""
        if job.manifest.threshold == 0:
            own, data, where = self._own(job), LocalData({}), None
            artifacts: Sequence[LocalArtifact] = [] if own is None else [own]
        else:
            data = self._data()
            artifacts, where = self._ahead_of(job, data)
        wanted: dict[str, None] = {}
        for artifact in artifacts:
            learner, _ = self.learner(job, artifact, data, where)
            wanted.update(dict.fromkeys(learner.wants(job.broadcast)))
            if job.manifest.threshold and self.is_control(job) and not self._kept(job, artifact):
                wanted.update(dict.fromkeys(learner.wants_alone(job.broadcast)))
        return tuple(wanted)

    def _ahead_of(
        self, job: TrainingJob, data: LocalData
    ) -> tuple[Sequence[LocalArtifact], Where | None]:
        """The artifacts of which one will be trained, and where work will be done that either end
        may do."""
        ahead = self._ahead(job, data)
        if self._kind.rehearses:
            chosen = self._capability(job, data)
            if chosen is not None:
                self._measured[job.manifest.task] = chosen
            return [_chosen(job, chosen)], None
        known = self._known(job, data, ahead)
        where = _where(known)
        if where is None and ahead is not None and self._obstacle(ahead):
            where = "aggregator"
        return (job.artifacts if known is None else [_chosen(job, known)]), where

    def train(self, job: TrainingJob) -> TrainedRound:
        """One round. Raises LearnerError, ArtifactError, ValueError, or :class:`Declined`."""
        data = self._data()
        capability = self._measured.pop(job.manifest.task, None) or self._capability(job, data)
        artifact = _chosen(job, capability)
        found = self.evaluation(job)
        evaluation = None if found is None else self._received(job, artifact, data, found)
        received = self._shared(job, artifact) if job.terms.predicts == "global" else None
        learner, trainer = self.learner(job, artifact, data, _where(capability))
        for folder in [*self._trainers]:
            if folder not in (artifact.folder, artifact.companion):
                del self._trainers[folder]  # with its sessions: it was only measured
        start = self._clock.now()
        update = learner.train(job.broadcast)
        seconds = slowed(self._clock, start, self._options.slowdown)
        codec = BROADCAST_CODECS[job.terms.update_codec]
        if capability is not None:
            capability = capability.after(late=seconds > self.affordable_seconds(job))
        if evaluation is not None and learner.personalises(job.broadcast):
            evaluation.stage("personal", trainer)
        body = encode_update(update, codec, self._rng)
        state, model = learner.state(), model_arrays(trainer)
        if self.is_control(job):
            start = self._clock.now()
            state = {**state, **self._control(job, artifact, data, evaluation)}
            seconds += slowed(self._clock, start, self._options.slowdown)
        offered = [each.artifact_id for each in job.terms.artifacts]
        return TrainedRound(
            k=1 + (offered.index(artifact.artifact_id) if offered else 0),
            body=body,
            learner_state=state,
            capability=capability,
            seconds=seconds,
            artifact=artifact,
            model=model if received is None else received,
            evaluation=None if found is None else found.report,
            evaluation_detail="" if found is None else found.detail,
        )

    def _control(
        self,
        job: TrainingJob,
        artifact: LocalArtifact,
        data: LocalData,
        evaluation: ModelEvaluation | None,
    ) -> State:
        """The control arm's round."""
        # A generator of its own: the training draws what it would draw without a control arm.
        (rng,) = self._rng.spawn(1)
        make = partial(self._new_learner, artifact, data, rng, "aggregator")
        return train_control(make, job.broadcast, self._kept(job, artifact), evaluation)

    def _kept(self, job: TrainingJob, artifact: LocalArtifact) -> State:
        """What the control arm's last round left; nothing of another artifact, or from before the
        task was replaced."""
        manifest, models = job.manifest, self._home.models
        mark = models.model_mark(manifest.task)
        if mark is None or mark[0] != manifest.generation:
            return {}
        if models.learner_artifact(manifest.task) != artifact.artifact_id:
            return {}
        return apart(models.learner(manifest.task, job.terms.method) or {})[1]

    def _received(
        self, job: TrainingJob, artifact: LocalArtifact, data: LocalData, found: RoundEvaluation
    ) -> ModelEvaluation:
        """Evaluates the model received; what comes back evaluates the one trained."""
        learner, trainer = self.learner(job, artifact, LocalData({}))
        return evaluate_received(learner, trainer, job.broadcast, data, found)

    def adopt(self, job: TrainingJob) -> Mapping[str, NDArray[Any]] | None:
        """The task's last version as this device's model, where the method shares one; none where
        devices are better off with their own."""
        artifact = self._own(job)
        if artifact is None or job.terms.predicts == "personal":
            return None
        return self._shared(job, artifact)

    def _shared(
        self, job: TrainingJob, artifact: LocalArtifact
    ) -> Mapping[str, NDArray[Any]] | None:
        """The broadcast's model; none where the method shares none, or none to go on with, unless
        the fleet's figures say of the one that is evaluated that it is better."""
        learner, trainer = self.learner(job, artifact, LocalData({}))
        take = learner.receive if job.terms.predicts == "global" else learner.adopt
        return model_arrays(trainer) if take(job.broadcast) else None

    def _own(self, job: TrainingJob) -> LocalArtifact | None:
        """The artifact that this device's model is of."""
        own = self._home.models.learner_artifact(job.manifest.task)
        return next((each for each in job.artifacts if each.artifact_id == own), None)

    def _data(self) -> LocalData:
        source = self._source()
        if source is None:
            raise Declined(
                "the app has given no data to train on: Device.open(data=...) or device.provide",
                Reason.NO_DATA,
            )
        return source()

    def learner(
        self,
        job: TrainingJob,
        artifact: LocalArtifact,
        data: LocalData,
        where: Where | None = None,
    ) -> tuple[Learner, WatchedTrainer]:
        """The learner as the last commit left it; a new one for an artifact it is not of.

        ``where``: the placement that was measured; None for the option's.
        """
        learner, trainer = self._new_learner(artifact, data, self._rng, where)
        manifest, models = job.manifest, self._home.models
        if models.learner_artifact(manifest.task) == artifact.artifact_id:
            mark = models.model_mark(manifest.task)
            state = models.learner(manifest.task, job.terms.method)
            try:
                if state is not None:
                    learner.restore(apart(state)[0])
            except LearnerError:
                if mark is None or mark[0] == manifest.generation:
                    raise
                # The task was replaced: what was learnt is another method's, with this artifact.
                learner, trainer = self._new_learner(artifact, data, self._rng, where)
        if learner.needs_receipts:
            rounds = self._home.rounds.receipted(manifest.task, manifest.generation, _RECEIPTS)
            for part in reversed(rounds):
                learner.receipt(part.round, counted=part.verdict is Verdict.COUNTED)
        return learner, trainer

    def _new_learner(
        self,
        artifact: LocalArtifact,
        data: LocalData,
        rng: np.random.Generator,
        where: Where | None,
    ) -> tuple[Learner, WatchedTrainer]:
        trainer = self._trainer(artifact.folder)
        trainer.reset()
        companion = None
        if artifact.companion is not None:
            companion = self._trainer(artifact.companion)
            companion.reset()
        placement = self._options.placement if where is None else where
        parts = LearnerParts(lambda: data, trainer, companion, self._sender, rng, placement)
        return self._kind.make(parts), trainer

    def _trainer(self, folder: Path) -> WatchedTrainer:
        if folder not in self._trainers:
            seed = int(self._rng.integers(2**31))
            self._trainers[folder] = WatchedTrainer(
                folder,
                self._clock,
                seed=seed,
                providers=self._options.providers,
                watch=self._watch,
            )
        return self._trainers[folder]

    def _conditions(self, job: TrainingJob) -> str:
        ids = ",".join(each.artifact_id.hex()[:16] for each in job.artifacts)
        # A learning rate that falls from round to round makes no round slower.
        settings = sorted((n, v) for n, v in job.broadcast.settings.items() if n != "learning_rate")
        most = f" {self._options.most_attachment_bytes} bytes" if self._places() else ""
        if self.affordable_bytes is not None:
            most += f" {self.affordable_bytes} bytes a round"
        asked = self._options.providers
        by = "" if asked == "auto" else f" on {asked}"
        return f"{ids} {job.terms.method} {self.conditions(job)} {settings}{most}{by}"

    # -- work that either end may do ---------------------------------------------------------------

    def _places(self) -> bool:
        """Whether this device has to find out who does such work."""
        return self._options.placement == "auto" and self._kind.has_movable_work

    def _ahead(self, job: TrainingJob, data: LocalData) -> MovableWork | None:
        """What it would take here; None where there is none, or the option says where."""
        if not self._places():
            return None
        learner, _ = self.learner(job, job.artifacts[0], data)
        return learner.movable_work(job.broadcast)

    def _obstacle(self, ahead: MovableWork) -> str:
        """Why the device cannot do it, whatever the time it has; empty where it can."""
        most = self._options.most_attachment_bytes
        if ahead.obstacle or ahead.download_bytes <= most:
            return ahead.obstacle
        return (
            f"{ahead.fetched} are {ahead.download_bytes} bytes, above most_attachment_bytes "
            f"({most})"
        )

    # -- what this device can afford ---------------------------------------------------------------

    def _known(
        self, job: TrainingJob, data: LocalData, ahead: MovableWork | None
    ) -> CapabilityRow | None:
        """The choice made before, where conditions are as they were."""
        known = self._home.models.capability(job.manifest.task)
        if known is None or not known.holds(self._conditions(job), data.samples):
            return None
        placed = MeasuredPlacement.read(known)
        if placed is None:
            return known if ahead is None else None
        return known if placed.holds(ahead, self._options.most_attachment_bytes) else None

    def _capability(self, job: TrainingJob, data: LocalData) -> CapabilityRow | None:
        """The measured choice; None where there is nothing to choose."""
        declines = self._options.when_none_fits == "decline"
        chooses = self._options.artifact is None and (len(job.artifacts) > 1 or declines)
        ahead = self._ahead(job, data)
        if chooses or self._places():
            known = self._known(job, data, ahead)
            if known is not None:
                return known
        if ahead is not None:
            placed, choice = self._placed_choice(job, data, ahead, chooses=chooses)
        elif chooses:
            placed, choice = None, self._choice(job, data)
        else:
            return None
        if choice.place is None and chooses and declines:
            raise Declined(choice.reason, Reason.NO_ARTIFACT_FITS)
        return CapabilityRow(
            task=job.manifest.task,
            conditions=self._conditions(job),
            option=job.artifacts[choice.place or 0].artifact_id.hex(),
            size=max(1, data.samples),
            placement=None if placed is None else placed.where,
            placed_size=None if placed is None else placed.size,
            misses=0,
            reason=choice.reason,
            p90_seconds=choice.p90_seconds,
        )

    def _placed_choice(
        self, job: TrainingJob, data: LocalData, ahead: MovableWork, *, chooses: bool
    ) -> tuple[MeasuredPlacement, Fit]:
        """A choice with the work done here where that fits, else by the aggregator."""
        where: Where = "aggregator"
        choice = Fit(0, None, "")
        why = self._obstacle(ahead)
        if not why:
            choice = self._choice(job, data, "device")
            if choice.place is None:
                why = f"{ahead.with_it}, {choice.reason}"
            else:
                where = "device"
        if where == "device":
            reason = f"This device {ahead.here}: {choice.reason}"
        else:
            # One artifact is trained, whatever its round takes: there is nothing to measure.
            choice = self._choice(job, data, where) if chooses else Fit(0, None, "")
            reason = f"The aggregator {ahead.there}: {why.rstrip('.')}. {choice.reason}"
        return MeasuredPlacement.of(where, ahead), replace(choice, reason=reason.rstrip())

    def _choice(self, job: TrainingJob, data: LocalData, where: Where | None = None) -> Fit:
        bytes_of = partial(self._round_bytes, job, data, where)
        small, told = affordable(job.artifacts, bytes_of, self.affordable_bytes, "a round")
        if not small:
            return Fit(None, None, f"None is small enough for bytes_a_day:{told}")
        works = [
            ArrayWork(
                artifact,
                partial(self.learner, job, artifact, data, where),
                job.broadcast,
                self._clock,
                rehearses=self._kind.rehearses or where == "device",
            )
            for artifact in small
        ]
        request = Request(
            deadline_seconds=self.affordable_seconds(job),
            time_box_seconds=self._options.capability_seconds,
            slowdown=self._options.slowdown,
        )
        fit = choose(works, request, self._clock)
        chosen = small[fit.place or 0]
        reason = f"{fit.reason}{told} {self._trainers[chosen.folder].provider_report}".rstrip()
        place = None if fit.place is None else job.artifacts.index(chosen)
        return replace(fit, place=place, reason=reason)

    def _round_bytes(
        self, job: TrainingJob, data: LocalData, where: Where | None, artifact: LocalArtifact
    ) -> int:
        """About what a round with the artifact takes beside what is sent to all: attachments, as
        they are offered, and the update."""
        learner, trainer = self.learner(job, artifact, data, where)
        down = sum(job.broadcast.offered.get(name, 0) for name in learner.wants(job.broadcast))
        codec = BROADCAST_CODECS[job.terms.update_codec]
        return down + math.ceil(trainer.artifact.moved_numbers * _BYTES_A_NUMBER[codec])


def _chosen(job: TrainingJob, row: CapabilityRow | None) -> LocalArtifact:
    """The artifact that a row names; the smallest where there was no choice."""
    named = (each for each in job.artifacts if row and each.artifact_id.hex() == row.option)
    return next(named, job.artifacts[0])


def _where(row: CapabilityRow | None) -> Where | None:
    placed = None if row is None else MeasuredPlacement.read(row)
    return None if placed is None else placed.where


# Who does the work that either end may do: the choice as it was measured and is kept.


@dataclass(frozen=True, slots=True)
class MeasuredPlacement:
    """A choice of where.

    ``size``: of the work that was measured, rounded up to a power of two: attention's, say, is not
    measured anew for each device that joins the cluster.
    """

    where: Where
    size: int

    @classmethod
    def of(cls, where: Where, ahead: MovableWork) -> MeasuredPlacement:
        """The choice for what is ahead."""
        return cls(where, _power(ahead.size))

    @classmethod
    def read(cls, row: CapabilityRow) -> MeasuredPlacement | None:
        """The choice in a row; None where it holds none."""
        if row.placement is None or row.placed_size is None:
            return None
        return cls("device" if row.placement == "device" else "aggregator", row.placed_size)

    def holds(self, ahead: MovableWork | None, most_bytes: int) -> bool:
        """Whether the choice still stands.

        It does for half the size too: what is about as large as a power of two would be measured
        again and again. Nothing ahead (a device is alone in its cluster for a round) leaves it as
        it is. Offers that turn out larger than estimated end the work here.
        """
        if ahead is None:
            return True
        if self.where == "device" and ahead.download_bytes > most_bytes:
            return False
        near = _power(ahead.size)
        return near <= self.size <= 2 * max(1, near)


def _power(count: int) -> int:
    return 0 if count == 0 else 1 << (count - 1).bit_length()
