"""The one round that a device has in hand, from its manifest to what it leaves on the disk."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import platform
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.evaluation.report import write_evaluations
from device_sdk.home.home import Home
from device_sdk.home.model_store import StoredModel
from device_sdk.home.round_store import (
    OutboxRow,
    Participation,
    RoundOutcome,
    StoredEvaluation,
)
from device_sdk.methods.learner import Declined
from device_sdk.rounds.open_round import DeviceParts, OpenRound, Retry
from device_sdk.rounds.session import SessionKeeper
from device_sdk.rounds.turns import OverBudget, Ready
from device_sdk.system.version import __version__
from device_sdk.train.job import TrainedRound, TrainingJob, needs_receipts
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.manifest import Order, RoundManifest, order
from device_sdk.wire.publish.receipts import UpdateIdentity
from device_sdk.wire.publish.report import (
    MOST_TEXT_BYTES,
    Details,
    ItemCount,
    Reason,
    Report,
    ReportedOutcome,
)
from device_sdk.wire.seal.broadcast import (
    derive_broadcast_keys,
    find_group_key,
    open_manifest,
    read_manifest_label,
)
from device_sdk.world import DeviceWorld


def commit_round(
    home: Home,
    device_id: bytes,
    job: TrainingJob,
    result: TrainedRound,
    report: bytes | None = None,
) -> OutboxRow:
    """Commit users' vectors, model, k, the part in the round and the update, with its report if
    there is one; returns what is to be sent.

    Raises ``sqlite3.Error``, and then nothing has changed.
    """
    manifest = job.manifest
    identity = UpdateIdentity(device_id, manifest.task, manifest.generation, manifest.round)
    row = OutboxRow.of(identity, result.body, report)
    with home.database.transaction():
        artifact_id = None if result.artifact is None else result.artifact.artifact_id
        home.models.save_learner(manifest.task, result.learner_state, artifact_id, job.terms.method)
        save_model(home, job, result)
        if result.capability is not None:
            home.models.save_capability(result.capability)
        home.rounds.conclude(
            Participation(
                manifest.task,
                manifest.generation,
                manifest.round,
                manifest.version,
                RoundOutcome.TRAINED,
                k=result.k,
                train_seconds=result.seconds,
                artifact="" if result.artifact is None else result.artifact.name,
                items=result.items,
            )
        )
        if result.evaluation is not None:
            home.rounds.save_evaluation(
                StoredEvaluation(
                    manifest.task,
                    manifest.generation,
                    manifest.round,
                    manifest.version,
                    result.evaluation,
                    result.evaluation_detail,
                )
            )
        home.rounds.post(row)
    return row


def save_model(home: Home, job: TrainingJob, result: TrainedRound | None = None) -> None:
    """Keep what to predict with: the training's model, else the broadcast's arrays."""
    manifest = job.manifest
    model = StoredModel(
        manifest.task,
        manifest.generation,
        manifest.round,
        manifest.version,
        manifest.catalogue_id,
        result.model if result is not None and result.model is not None else job.broadcast.tensors,
        result.artifact.artifact_id if result is not None and result.artifact is not None else None,
    )
    home.models.save_model(model)


def read_model(
    home: Home, job: TrainingJob, adopted: Mapping[str, NDArray[Any]] | None = None
) -> None:
    """The task rests: keep its last version, unless the device has a model of its own.

    ``adopted``: that version as a model of the device's artifact.
    """
    manifest = job.manifest
    stored = home.models.model(manifest.task)
    if stored is None or stored.artifact_id is None:
        save_model(home, job)
    elif adopted is not None:
        model = replace(
            stored,
            generation=manifest.generation,
            round=manifest.round,
            version=manifest.version,
            arrays=adopted,
        )
        home.models.save_model(model)


_log = logging.getLogger("tessera.device")
# A manifest refused for one of these may be right after the next descriptor or session.
_MAY_COME_RIGHT = frozenset(
    {"unknown-epoch", "bad-signature", "bad-tag", "no-descriptor", "descriptor-expired", "old-time"}
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A verified manifest that asks for something. ``selected``: whether this device is to act."""

    manifest: RoundManifest
    selected: bool


class ManifestIntake:
    """Verifies manifests of the device's own task and cohort, in the order the protocol demands.

    The newest message waits here until there is a session, or the aggregator has said when there
    can be one, and while it may come right.
    """

    def __init__(self, world: DeviceWorld, sessions: SessionKeeper) -> None:
        self._world = world
        self._membership, self._store = world.membership, world.home.rounds
        self._sessions = sessions
        self._newest = b""
        self._came_seconds, self._is_live = 0.0, False
        self._is_over = False
        self._waits = False
        self._retry: Retry | None = None
        self.expired: RoundManifest | None = None
        """A round that this device was selected for, whose manifest came after its deadline."""

    def take(self, message: bytes | None = None, *, live: bool = False) -> Accepted | None:
        """The manifest that waits; None for none, and for one that was concluded before.

        A ``message`` that just came waits from now on, in the place of any other; ``live``: it was
        sent at this moment, and did not lie at the broker. Takes none
        without an open session, unless the device only waits for one as it was told: then it may
        train meanwhile, and comes sooner for it. The manifest's mark is on the disk when this
        returns. A round that a crash interrupted before its end comes back as if new. Raises
        ``WireError``: ``unknown-epoch`` (open a new session), ``stale-manifest``,
        ``version-fell``, ``expired-manifest``, ``old-time`` (over, by a time that is asked for
        again), ``wrong-manifest``, or another; and
        ``sqlite3.Error`` where the mark cannot be written.
        """
        if message is not None:
            if message == self._newest and (self._is_over or self._retry is not None):
                return None  # shown again: it was judged, or has a time of its own
            self._newest, self._waits, self._retry, self._is_over = message, True, None, False
            self._came_seconds, self._is_live = self._world.clock(), live
        if not self._waits or not (self._sessions.is_open or self._sessions.waits_as_told):
            return None
        self._waits = False
        try:
            return self._verified(self._newest)
        except WireError as error:
            self._waits = error.reason in _MAY_COME_RIGHT
            self._is_over = error.reason == "expired-manifest"
            raise

    def postpone(self) -> None:
        """What was just taken could not be acted on: it waits again, until it is :meth:`due`."""
        self._waits = True
        if self._retry is None:
            self._retry = Retry(self._world)

    def due(self) -> bool:
        """Whether to take again what was postponed."""
        return self._waits and self._retry is not None and self._retry.due()

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`due` comes true; infinite for never."""
        return self._retry.next_seconds if self._retry and self._waits else math.inf

    def _verified(self, message: bytes) -> Accepted | None:
        membership = self._membership
        label = read_manifest_label(message)
        key = find_group_key(self._sessions.group_keys, label.epoch)
        keys = derive_broadcast_keys(key, label.broadcast_id, membership.task, membership.cohort)
        body = open_manifest(message, keys, self._sessions.signing())
        manifest = decode(RoundManifest, body)
        if (manifest.key_epoch, manifest.broadcast_id) != (label.epoch, label.broadcast_id):
            raise WireError("wrong-manifest", "epoch or broadcast id differ inside and outside")
        if (manifest.task, manifest.cohort) != (membership.task, membership.cohort):
            raise WireError("wrong-manifest", "a manifest of another task or cohort")
        if manifest.root_fingerprint != self._sessions.root_fingerprint:
            raise WireError("wrong-root", "a manifest of another root")
        which, mark = order(self._store.mark(manifest.task, manifest.cohort), manifest, body)
        if which is Order.NEWER:
            opened, descriptor = manifest.opened_unix_seconds, self._sessions.descriptor
            assert descriptor is not None
            descriptor.require_unexpired(opened)
            self._sessions.time.opened(opened, self._came_seconds, live=self._is_live)
        chosen = manifest.selects(membership.grant.device_id)
        if self._sessions.time.unix_seconds() >= manifest.deadline_unix_seconds:
            if which is Order.SAME:
                return None  # the broker shows it until the next one
            if self._sessions.ask_for_time_at(manifest.deadline_unix_seconds):
                raise WireError("old-time", "the round's time is over, if this device's is right")
            if chosen:
                self.expired = manifest
            raise WireError("expired-manifest", "the round's time is over")
        if which is Order.NEWER:
            with self._world.home.database.transaction():
                self._world.home.membership.raise_time(manifest.opened_unix_seconds)
                self._store.save_mark(manifest, mark)
        if self._store.participation(manifest.task, manifest.generation, manifest.round):
            return None
        return Accepted(manifest, chosen)


class CurrentRound:
    """At most one round of a task: fetched, asked about, trained, committed, and concluded in any
    case.

    Whoever trains looks at ``question``, then at ``job``.
    """

    def __init__(self, world: DeviceWorld, shared: DeviceParts) -> None:
        self._world, self._home = world, world.home
        self.task, self.cohort = world.membership.task, world.membership.cohort
        self._shared = shared
        self._turns, self._budget = shared.turns, shared.budget
        self._sessions, self._sender = shared.sessions, shared.sender
        self._trains = False
        self._took_seconds: float | None = None
        self._ready_seconds = 0.0
        self._missed: tuple[int, int] | None = None
        self._reports = Reporter(world)
        self._intake = ManifestIntake(world, shared.sessions)
        self._connected = False
        self._held_back = False
        self._round: OpenRound | None = None
        self.deadline_seconds = math.inf
        """Of the round in hand, by this device's clock: what its manifest left when it was taken,
        whatever anybody's calendar says later."""
        self.question: TrainingJob | None = None
        """A round that offers attachments: :meth:`wanted` or :meth:`ended` must follow."""
        self.kept_back = ""
        """Why the device's owner does not let it begin, though all is here."""
        self.job: TrainingJob | None = None
        """A round to train now: :meth:`trained` or :meth:`ended` must follow.

        One that selects nobody (threshold 0) is not to be trained, but to be read: the task rests,
        and the device's own model may take over its last version. :meth:`read` must follow.
        """

    @property
    def manifest(self) -> RoundManifest | None:
        """Of the round in hand; None for none."""
        return None if self._round is None else self._round.manifest

    @property
    def ready(self) -> Ready | None:
        """The job as one that waits for its turn; None where there is none, or the task rests."""
        if self.job is None or self.job.manifest.threshold == 0:
            return None
        return Ready(
            self.task,
            self.deadline_seconds,
            self._expected_seconds(self.job),
            self._ready_seconds,
        )

    def begin(self) -> bool:
        """The job's training begins; False where the round ends instead: over the day's budget.

        A first training begins where anything is left of the day: the task's ``train_seconds`` is a
        bound, and says nothing of what it takes here.
        """
        assert self.job is not None
        if self._trains:
            self._settle()  # its end could not be stored: it is trained again
        try:
            self._budget.require(seconds=self._took_seconds or 0.0)
        except OverBudget as reason:
            self._over_budget(self.job.manifest, reason)
            return False
        self._budget.set_aside(self._expected_seconds(self.job))
        self._trains = True
        self._turns.began(self.task, self._world.clock())
        return True

    def give_up(self, why: str) -> None:
        """The job's round ends without a training, for another task's sake."""
        if self.job is not None:
            self._conclude(self.job.manifest, RoundOutcome.TOO_LATE, why, Reason.TOO_LATE)

    def _too_late(self, manifest: RoundManifest, why: str) -> None:
        """The round is over; where its device's owner kept it back, that is the reason."""
        if self.kept_back and (self.job is not None or self.question is not None):
            detail = f"not-now: {self.kept_back} until {why}"
            self._conclude(manifest, RoundOutcome.DECLINED, detail, Reason.NOT_NOW)
        else:
            self._conclude(manifest, RoundOutcome.TOO_LATE, why, Reason.TOO_LATE)

    def drop(self) -> None:
        """The task is not for this device any more: the round is left as a crash would leave it."""
        self._close()

    def connected(self, value: bool) -> None:
        """The broker's connection came or went."""
        self._connected = value
        if value and self._round is not None:
            self._round.retry.progressed()  # the link subscribes again by itself

    def take_manifest(self, message: bytes | None = None, *, live: bool = False) -> None:
        """Take the manifest that just came, or else the one that waits, once there is a session.
        ``live``: it did not lie at the broker.

        Its round is begun, or concluded where there is nothing to do. Raises ``WireError``, where
        the broadcast's key is missing or there is nothing to fetch too, and ``sqlite3.Error``.
        """
        try:
            accepted = self._intake.take(message, live=live)
            if accepted is not None:
                self._take(accepted)
        except WireError as error:
            if error.reason == "unknown-epoch":
                self._sessions.reopen()
            if self._intake.expired is not None:
                self._miss(self._intake.expired)
                self._intake.expired = None
            raise
        except sqlite3.Error:
            # Nothing is begun whose mark could be forgotten; but a disk is not full for ever.
            self._intake.postpone()
            raise

    def _take(self, accepted: Accepted) -> None:
        manifest = accepted.manifest
        if self._round is not None:
            if self._round.manifest == manifest:
                return  # shown again, as after a reconnection
            if self.ready is not None:
                self._turns.lose(self.task)
            self._too_late(self._round.manifest, "the next round opened")
        # Only for news: a broker that repeats a manifest must not shorten the waits.
        self._sessions.went_well()
        self.deadline_seconds = self._sessions.time.clock_seconds(manifest.deadline_unix_seconds)
        if not accepted.selected and not self._is_wanted_to_read(manifest):
            self._conclude(manifest, RoundOutcome.NOT_SELECTED)
        elif accepted.selected and self._sender.obstacle:
            self._hold_back(manifest, self._sender.obstacle)
        elif accepted.selected and (lack := self._world.lacks(self.task, manifest.generation)):
            self._conclude(manifest, RoundOutcome.DECLINED, lack, Reason.NO_DATA)
        else:
            self._held_back = False
            self._begin_to_fetch(accepted)

    def _begin_to_fetch(self, accepted: Accepted) -> None:
        manifest = accepted.manifest
        self._ready_seconds = self._turns.waited_since(self.task, self._world.clock())
        try:
            if accepted.selected:
                self._budget.require(bytes_=manifest.length)
            self._round = OpenRound(manifest, self._world, self._shared)
        except OverBudget as reason:
            self._over_budget(manifest, reason)
        except WireError as error:
            if error.reason == "truncated":
                self._conclude(manifest, RoundOutcome.FAILED, str(error), Reason.BAD_CONTENT)
            raise

    def _miss(self, manifest: RoundManifest) -> None:
        """The deadline passed before anything was done: for another task's training, perhaps."""
        which = (manifest.generation, manifest.round)
        if which != self._missed:
            self._missed = which
            deadline = self._sessions.time.clock_seconds(manifest.deadline_unix_seconds)
            self._turns.missed(self.task, deadline)

    def chunk(self, content_id: bytes, index: int, payload: bytes) -> None:
        """A chunk's or head's message came, of whatever round. Raises ``WireError`` for one that
        cannot be used."""
        round_ = self._round
        if round_ is None or content_id not in round_.fetches or self.job is not None:
            return  # another task's, or on its way while we unsubscribed
        try:
            round_.add(content_id, index, payload)
        except OverBudget as over:
            self._over_budget(round_.manifest, over)
            return
        except Declined as declined:
            why = str(declined)
            self._conclude(round_.manifest, RoundOutcome.DECLINED, why, declined.reason)
            return
        except WireError as error:
            if error.reason == "unknown-epoch":
                self._sessions.reopen()
            if round_.broken is not None:
                why = str(error)
                self._conclude(round_.manifest, RoundOutcome.FAILED, why, Reason.BAD_CONTENT)
            raise
        self._advance(round_)

    def not_mirrored(self, content_id: bytes) -> None:
        """The fleet's mirror lacks a chunk of this content."""
        if self._round is not None:
            self._round.not_mirrored(content_id)

    def receipted(self) -> None:
        """An update got its receipt: the round may have waited for it."""
        if self._round is not None and self.job is None and self.question is None:
            self._advance(self._round)

    def tick(self) -> None:
        """Take a manifest that was put off, ask again for what did not come, or give up at the
        deadline. Raises as :meth:`take_manifest` does."""
        round_ = self._round
        if round_ is not None and not self._trains:
            if self._is_over:
                what = "chunks" if round_.fetches else "receipts"
                detail = f"not all {what} came in time"
                if self.ready is not None:
                    detail = "another task was trained until the deadline"
                    self._turns.lose(self.task)
                self._too_late(round_.manifest, detail)
            elif self._connected and round_.fetches and round_.retry.due():
                round_.ask_again()
        if self._intake.due():
            self.take_manifest()

    def next_seconds(self) -> float:
        """The monotonic time at which something is to do here; infinite for never."""
        round_, intake_seconds = self._round, self._intake.next_seconds()
        if round_ is None or self._trains:
            return intake_seconds
        asks_again = self._connected and round_.fetches
        retry = round_.retry.next_seconds if asks_again else math.inf
        return min(retry, intake_seconds, self.deadline_seconds)

    def wanted(self, names: Sequence[str]) -> None:
        """The learner's answer to :attr:`question`: the attachments to fetch before training.

        Raises LearnerError for a name that is not offered.
        """
        if self._round is not None and self.question is not None:
            try:
                self._round.ask_for(names)
            except OverBudget as over:
                self._over_budget(self._round.manifest, over)
                return
            self.question = None
            self._advance(self._round)

    def trained(self, job: TrainingJob, result: TrainedRound) -> None:
        """Commit the round's outcome, update and all, in one transaction; then send it."""
        if self._is_over:
            if result.capability is not None:
                self._home.models.save_capability(result.capability)
            why = f"training took {result.seconds:.1f} s"
            self.ended(job, RoundOutcome.TOO_LATE, why, Reason.TOO_SLOW)
            return
        received_bytes = 0 if self._round is None else self._round.received_bytes
        row = commit_round(
            self._home,
            self._world.membership.grant.device_id,
            job,
            result,
            self._reports.of(ReportedOutcome.TRAINED, None, received_bytes, result),
        )
        self._close()
        self._sender.add(row, self.deadline_seconds)

    def read(self, job: TrainingJob, adopted: Mapping[str, NDArray[Any]] | None = None) -> None:
        """The task rests, and its last version was read; see :func:`read_model`."""
        with self._home.database.transaction():
            read_model(self._home, job, adopted)
            self._conclude(job.manifest, RoundOutcome.READ)

    def ended(
        self,
        job: TrainingJob,
        outcome: RoundOutcome,
        detail: str,
        reason: Reason,
        items: ItemCount | None = None,
    ) -> None:
        """The round ends here without an update; ``detail`` says why to this device's owner,
        ``reason`` to the aggregator's operator, and ``items`` to both what was recorded."""
        self._conclude(job.manifest, outcome, detail, reason, items)

    def _over_budget(self, manifest: RoundManifest, why: OverBudget) -> None:
        self._conclude(manifest, RoundOutcome.OVER_BUDGET, str(why), Reason.OVER_BUDGET)

    def _hold_back(self, manifest: RoundManifest, obstacle: str) -> None:
        if not self._held_back:
            _log.warning("round %d and later ones are not trained: %s", manifest.round, obstacle)
        self._held_back = True
        self._conclude(manifest, RoundOutcome.OUTBOX_FULL, obstacle)

    def _is_wanted_to_read(self, manifest: RoundManifest) -> bool:
        # Nobody is selected: the task rests, and this version is there to be used. Whoever has
        # vectors of its users takes it, or would recommend from the version before for ever.
        mark = self._home.models.model_mark(manifest.task)
        return manifest.threshold == 0 and mark is not None

    def _advance(self, round_: OpenRound) -> None:
        if round_.fetches:
            return
        try:
            job = round_.job()
        except WireError as error:
            # Signed by the aggregator and unusable all the same: asking again would not help.
            why = str(error)
            self._conclude(round_.manifest, RoundOutcome.FAILED, why, Reason.BAD_CONTENT)
            raise
        rests = job.manifest.threshold == 0
        if rests and not self._has_own_model(job):
            self.read(job)
        elif not rests and self._sender.waits_for(self.task) and needs_receipts(job.terms.method):
            return  # the learner has to know what of its own counted: until :meth:`receipted`
        elif round_.asks:
            self.question = job
        else:
            self.job = job
            self._ready_seconds = min(self._ready_seconds, self._world.clock())
            generation = job.manifest.generation
            self._took_seconds = self._home.rounds.trained_seconds(self.task, generation)

    def _expected_seconds(self, job: TrainingJob) -> float:
        return job.terms.train_seconds if self._took_seconds is None else self._took_seconds

    def _has_own_model(self, job: TrainingJob) -> bool:
        return self._home.models.learner_artifact(job.manifest.task) is not None

    def _conclude(
        self,
        manifest: RoundManifest,
        outcome: RoundOutcome,
        detail: str = "",
        reason: Reason | None = None,
        items: ItemCount | None = None,
    ) -> None:
        """The round ended without an update: with a ``reason``, the aggregator is told."""
        row = None if reason is None else self._note(manifest, outcome, reason, items)
        self._close()
        task, generation = manifest.task, manifest.generation
        with self._home.database.transaction():
            self._home.rounds.conclude(
                Participation(
                    task,
                    generation,
                    manifest.round,
                    manifest.version,
                    outcome,
                    detail,
                    items=items,
                )
            )
            if row is not None:
                self._home.rounds.post(row)
        if row is not None:
            self._sender.add(row)

    def _note(
        self,
        manifest: RoundManifest,
        outcome: RoundOutcome,
        reason: Reason,
        items: ItemCount | None,
    ) -> OutboxRow | None:
        """The report alone; None for a round that did not ask for this device, and where what came
        before was not taken yet."""
        device_id = self._world.membership.grant.device_id
        if not manifest.selects(device_id) or self._sender.is_full:
            return None
        declined = outcome in (RoundOutcome.DECLINED, RoundOutcome.OVER_BUDGET)
        report = self._reports.of(
            ReportedOutcome.DECLINED if declined else ReportedOutcome.FAILED,
            reason,
            0 if self._round is None else self._round.received_bytes,
            items=items,
        )
        identity = UpdateIdentity(device_id, manifest.task, manifest.generation, manifest.round)
        return OutboxRow.of(identity, b"", report)

    def _close(self) -> None:
        if self._trains:
            self._settle()
        if self._round is not None:
            for fetch in self._round.fetches.values():
                fetch.stop()
        self._round = self.job = self.question = None
        self.kept_back = ""

    def _settle(self) -> None:
        self._trains = False
        self._turns.ended(self.task, self._world.clock())
        self._budget.settle()

    @property
    def _is_over(self) -> bool:
        return self._world.clock() >= self.deadline_seconds


# What this device tells of its rounds, made here and nowhere else.

_MOST_COUNT = 2**32 - 1


class Reporter:
    """Makes reports, of what the app lets out."""

    def __init__(self, world: DeviceWorld) -> None:
        self._options = world.options

    def of(
        self,
        outcome: ReportedOutcome,
        reason: Reason | None = None,
        received_bytes: int = 0,
        result: TrainedRound | None = None,
        items: ItemCount | None = None,
    ) -> bytes:
        """A report's bytes. ``items``: what was recorded, where there is no ``result`` that says
        it."""
        why = "" if reason is None else reason.value
        if self._options.report != "full":
            return encode(Report(outcome, why))
        option, seconds, evaluation = "", None, b""
        if result is not None:
            named = "" if result.artifact is None else result.artifact.name
            # Single precision: a report is small.
            option, seconds = named or f"k={result.k}", float(np.float32(result.seconds))
            items = result.items
            if result.evaluation is not None:
                evaluation = write_evaluations(result.evaluation)
        details = Details(
            _fitting("sdk", __version__),
            _fitting("runtime", _runtime_version()),
            _fitting("platform", f"{sys.platform}-{platform.machine()}"),
            _fitting("option", option),
            seconds,
            min(received_bytes, _MOST_COUNT),
            self._options.labels,
            items,
        )
        return encode(Report(outcome, why, details, evaluation))


def _fitting(name: str, text: str) -> str:
    return text.encode()[: MOST_TEXT_BYTES[name]].decode(errors="ignore")


@cache
def _runtime_version() -> str:
    """Of the onnxruntime that is installed, without loading it; empty where there is none."""
    try:
        return importlib.metadata.version("onnxruntime")
    except importlib.metadata.PackageNotFoundError:
        return ""
