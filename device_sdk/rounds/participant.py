"""A device's part in rounds: sessions, manifests, fetching, commits, sending, receipts."""

from __future__ import annotations

import logging
import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.home.home import Home
from device_sdk.home.membership import Membership
from device_sdk.home.round_store import Outcome
from device_sdk.rounds.actions import Actions
from device_sdk.rounds.artifact_wishes import ArtifactWishes
from device_sdk.rounds.intake import ManifestIntake
from device_sdk.rounds.job import Declined, TrainedRound, TrainingJob
from device_sdk.rounds.open_round import OpenRound
from device_sdk.rounds.outbox_limit import OutboxLimit
from device_sdk.rounds.pace import Pace
from device_sdk.rounds.refusals import Refusals
from device_sdk.rounds.round_commit import commit_round, participation, read_model
from device_sdk.rounds.sender import Sender
from device_sdk.rounds.session_keeper import SessionKeeper
from device_sdk.wire.errors import WireError
from device_sdk.wire.header import FIRST_ENVELOPE_TYPE, MessageType
from device_sdk.wire.manifest import Manifest
from device_sdk.wire.messages import RecordType, read_receipt
from device_sdk.wire.topics import (
    ChunkTopic,
    DescriptorTopic,
    DownTopic,
    ManifestTopic,
    PresenceTopic,
    Topic,
    Topics,
    UpTopic,
)

__all__ = ["Participant"]

_log = logging.getLogger("tessera.device")
_TIME_SAVED_EVERY_SECONDS = 3600.0


class Participant:
    """Sans-io: messages, connections and time in; ``actions`` and training jobs out.

    Args:
        artifacts: folders of artifacts that are installed with the device, by their id.
        wishes: which of a task's artifacts to take.
        outbox_limit: with so many updates without receipts no further round is begun.
        clock: monotonic seconds that count the machine's sleep.
        rng: jitter.

    Whoever runs it: passes on what the link reports, carries out ``actions``, calls :meth:`tick`
    at :meth:`next_seconds`, answers :meth:`take_question`, and trains what :meth:`take_job` gives.
    Nothing here raises for bad input; it is counted in ``refusals``.
    """

    def __init__(
        self,
        home: Home,
        membership: Membership,
        *,
        artifacts: Mapping[bytes, Path],
        wishes: ArtifactWishes | None = None,
        outbox_limit: OutboxLimit | None = None,
        pace: Pace,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        self._home = home
        self._membership = membership
        self._artifacts = artifacts
        self._wishes = wishes if wishes is not None else ArtifactWishes()
        self._pace = pace
        self._clock = clock
        self._rng = rng
        self._topics = Topics(membership.prefix)
        self.actions = Actions()
        self.refusals = Refusals()
        self.sessions = SessionKeeper(home, membership, self.actions, pace, clock=clock, rng=rng)
        grant = membership.grant
        up = self._topics.write(UpTopic(grant.shard, grant.handle))
        self.sender = Sender(
            home.rounds, grant.device_id, up, self.sessions, self.actions, pace,
            outbox_limit if outbox_limit is not None else OutboxLimit(), clock=clock, rng=rng,
        )  # fmt: skip
        self._intake = ManifestIntake(
            membership, home.rounds, self.sessions, pace, clock=clock, rng=rng
        )
        self._connected = False
        self._held_back = False
        self._presence: bytes | None = None
        self._round: OpenRound | None = None
        self._job: TrainingJob | None = None
        self._question: TrainingJob | None = None
        self._save_time_seconds = clock() + _TIME_SAVED_EVERY_SECONDS

    @property
    def working_on(self) -> Manifest | None:
        """The manifest of the round that is being fetched or trained."""
        return None if self._round is None else self._round.manifest

    @property
    def problem(self) -> str:
        """What keeps this device from taking part, for people; empty for nothing."""
        return self.sessions.problem or self.sender.obstacle

    def start(self) -> None:
        """Subscribe to what every device listens to."""
        membership = self._membership
        topics: tuple[Topic, ...] = (
            DescriptorTopic(),
            DownTopic(membership.grant.handle),
            PresenceTopic(),
            ManifestTopic(membership.task, membership.cohort),
        )
        for topic in topics:
            self.actions.subscribe(self._topics.write(topic))

    def connected(self, value: bool) -> None:
        """The broker's connection came or went."""
        self._connected = value
        self.sessions.connected(value)
        self.sender.connected(value)
        if value and self._round is not None:
            self._round.retry.progressed()  # the link subscribes again by itself

    def message(self, topic_text: str, payload: bytes, *, retained: bool) -> None:
        """A publication came."""
        what = "message"
        try:
            topic = self._topics.parse(topic_text)
            what = type(topic).__name__.removesuffix("Topic").lower() + " message"
            self._dispatch(topic, payload, retained)
        except WireError as error:
            self.refusals.count(what, error)

    def tick(self) -> None:
        """Do what is due."""
        if self._round is not None and self._job is None:
            self._watch_round(self._round)
        self.sessions.tick()
        self.sender.tick()
        if self._clock() >= self._save_time_seconds:
            self._save_time_seconds = self._clock() + _TIME_SAVED_EVERY_SECONDS
            if self.sessions.time.now() is not None:
                self._home.membership.raise_time(self.sessions.time.largest_unix_seconds)
        if self._intake.due():
            try:
                self._try_manifest()
            except WireError as error:
                self.refusals.count("manifest message", error)

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`tick` has something to do; infinite for never."""
        times = [
            self.sessions.next_seconds(),
            self.sender.next_seconds(),
            self._save_time_seconds,
            self._intake.next_seconds(),
        ]
        if self._round is not None and self._job is None:
            if self._connected:
                times.append(self._round.retry.next_seconds)
            deadline = self.sessions.time.clock_seconds(self._round.manifest.deadline_unix_seconds)
            times.append(math.inf if deadline is None else deadline)
        return min(times)

    def take_question(self) -> TrainingJob | None:
        """A round that offers attachments, or None. :meth:`wanted` or :meth:`ended` must follow."""
        return self._question

    def wanted(self, names: Sequence[str]) -> None:
        """The learner's answer: the attachments to fetch before the round in question is trained.

        Raises LearnerError for a name that is not offered.
        """
        if self._round is not None and self._question is not None:
            self._round.ask_for(names)
            self._question = None
            self._advance(self._round)

    def take_job(self) -> TrainingJob | None:
        """A round to train now, or None. :meth:`trained` or :meth:`ended` must follow.

        One that selects nobody (threshold 0) is not to be trained, but to be read: the task rests,
        and the device's own model may take over its last version. :meth:`read` must follow.
        """
        return self._job

    def trained(self, job: TrainingJob, result: TrainedRound) -> None:
        """Commit the round's outcome, update and all, in one transaction; then send it."""
        manifest = job.manifest
        if self._is_past(manifest.deadline_unix_seconds):
            if result.capability is not None:
                self._home.models.save_capability(result.capability)
            self.ended(job, Outcome.TOO_LATE, f"training took {result.seconds:.1f} s")
            return
        row = commit_round(
            self._home,
            self._membership.grant.device_id,
            job,
            result,
            self.sessions.time.largest_unix_seconds,
        )
        self._close_round()
        self.sender.add(row)

    def read(self, job: TrainingJob, adopted: Mapping[str, NDArray[Any]] | None = None) -> None:
        """The task rests, and its last version was read; see :func:`read_model`."""
        with self._home.database.transaction():
            read_model(self._home, job, adopted)
            self._conclude(job.manifest, Outcome.READ)

    def ended(self, job: TrainingJob, outcome: Outcome, detail: str) -> None:
        """The round ends here without an update; ``detail`` says why."""
        self._conclude(job.manifest, outcome, detail)

    def _dispatch(self, topic: Topic, payload: bytes, retained: bool) -> None:
        match topic:
            case DescriptorTopic():
                self.sessions.on_descriptor(payload)
                self._retry_refused()
            case PresenceTopic():
                self._presence = payload
                self.sessions.on_presence(payload)
            case DownTopic():
                if retained:
                    raise WireError("retained", "nothing retained is accepted on this topic")
                self._on_down(payload)
            case ManifestTopic():
                self._intake.put(payload)
                self._try_manifest()
            case ChunkTopic(content_id, index):
                self._on_chunk(content_id, index, payload)
            case _:
                raise WireError("bad-topic", "a topic that no device listens to")

    def _on_down(self, payload: bytes) -> None:
        if len(payload) > 1 and payload[1] == MessageType.SESSION_REPLY:
            self.sessions.on_reply(payload)
            self.sender.session_opened()
            self._retry_refused()
            return
        if len(payload) > 1 and payload[1] < FIRST_ENVELOPE_TYPE:
            raise WireError("bad-type", "neither a session's reply nor an envelope")
        received = self.sessions.receive(payload)
        if received.message_type != RecordType.RECEIPT or received.fragment is not None:
            raise WireError("bad-type", "devices take whole receipts and nothing else")
        receipt = read_receipt(received.payload)
        self.sessions.went_well()
        self.sender.on_receipt(receipt)

    def _retry_refused(self) -> None:
        presence, self._presence = self._presence, None
        if presence is not None:
            self.message(self._topics.write(PresenceTopic()), presence, retained=True)
        self._try_manifest()

    def _try_manifest(self) -> None:
        try:
            self._take_manifest()
        except sqlite3.Error:
            # Nothing is begun whose mark could be forgotten; but a disk is not full for ever.
            self._intake.postpone()
            raise

    def _take_manifest(self) -> None:
        try:
            accepted = self._intake.take()
        except WireError as error:
            if error.reason == "unknown-epoch":
                self.sessions.reopen()
            raise
        if accepted is None:
            return
        manifest = accepted.manifest
        if self._round is not None:
            if self._round.manifest == manifest:
                return  # shown again, as after a reconnection
            self._conclude(self._round.manifest, Outcome.TOO_LATE, "the next round opened")
        # Only for news: a broker that repeats a manifest must not shorten the waits.
        self.sessions.went_well()
        if not accepted.selected and not self._is_wanted_to_read(manifest):
            self._conclude(manifest, Outcome.NOT_SELECTED)
        elif self._is_past(manifest.deadline_unix_seconds):
            self._conclude(manifest, Outcome.TOO_LATE, "the deadline was over on arrival")
        elif accepted.selected and self.sender.obstacle:
            self._hold_back(manifest, self.sender.obstacle)
        else:
            self._held_back = False
            self._begin(manifest)

    def _hold_back(self, manifest: Manifest, obstacle: str) -> None:
        if not self._held_back:
            _log.warning("round %d and later ones are not trained: %s", manifest.round, obstacle)
        self._held_back = True
        self._conclude(manifest, Outcome.OUTBOX_FULL, obstacle)

    def _is_wanted_to_read(self, manifest: Manifest) -> bool:
        # Nobody is selected: the task rests, and this version is there to be used. Whoever has
        # vectors of its users takes it, or would recommend from the version before for ever.
        mark = self._home.models.model_mark(manifest.task)
        return manifest.threshold == 0 and mark is not None

    def _begin(self, manifest: Manifest) -> None:
        try:
            self._round = OpenRound(
                manifest,
                self._home,
                self._membership,
                self.sessions,
                self._topics,
                self.actions,
                self._artifacts,
                self._wishes,
                self._pace,
                clock=self._clock,
                rng=self._rng,
            )
        except WireError as error:
            if error.reason == "truncated":
                self._conclude(manifest, Outcome.FAILED, str(error))
            raise

    def _on_chunk(self, content_id: bytes, index: int, payload: bytes) -> None:
        round_ = self._round
        if round_ is None or self._job is not None:
            return  # on its way while we unsubscribed
        try:
            round_.add(content_id, index, payload)
        except Declined as reason:
            self._conclude(round_.manifest, Outcome.DECLINED, str(reason))
            return
        except WireError as error:
            if error.reason == "unknown-epoch":
                self.sessions.reopen()
            if round_.broken is not None:
                self._conclude(round_.manifest, Outcome.FAILED, str(error))
            raise
        self._advance(round_)

    def _advance(self, round_: OpenRound) -> None:
        if not round_.is_complete:
            return
        try:
            job = round_.job()
        except WireError as error:
            # Signed by the aggregator and unusable all the same: asking again would not help.
            self._conclude(round_.manifest, Outcome.FAILED, str(error))
            raise
        if round_.manifest.threshold == 0 and not self._has_own_model(job):
            self.read(job)
        elif round_.asks:
            self._question = job
        else:
            self._job = job

    def _has_own_model(self, job: TrainingJob) -> bool:
        return self._home.models.learner_artifact(job.manifest.task) is not None

    def _watch_round(self, round_: OpenRound) -> None:
        if self._is_past(round_.manifest.deadline_unix_seconds):
            self._conclude(round_.manifest, Outcome.TOO_LATE, "not all chunks came in time")
        elif self._connected and round_.retry.due():
            round_.ask_again()

    def _conclude(self, manifest: Manifest, outcome: Outcome, detail: str = "") -> None:
        self._close_round()
        self._home.rounds.conclude(participation(manifest, outcome, detail))

    def _close_round(self) -> None:
        if self._round is not None:
            self._round.stop()
        self._round = self._job = self._question = None

    def _is_past(self, unix_seconds: int) -> bool:
        now = self.sessions.time.now()
        return now is not None and now >= unix_seconds
