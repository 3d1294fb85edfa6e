"""A device's part in rounds: each message goes to the part that it concerns."""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.home.home import Home
from device_sdk.home.membership import Membership
from device_sdk.home.round_store import RoundOutcome
from device_sdk.rounds.actions import Actions
from device_sdk.rounds.current_round import CurrentRound
from device_sdk.rounds.intake import ManifestIntake
from device_sdk.rounds.pace import Pace
from device_sdk.rounds.sender import OutboxLimit, Sender
from device_sdk.rounds.session import SessionKeeper
from device_sdk.train.affordable import ArtifactWishes
from device_sdk.train.job import TrainedRound, TrainingJob
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.header import FIRST_ENVELOPE_TYPE, MessageType
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.receipts import RecordType, read_receipt
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    DownTopic,
    ManifestTopic,
    PresenceTopic,
    Topic,
    Topics,
    UpTopic,
)

# Bad input, counted by reason and logged once per reason.

_log = logging.getLogger("tessera.device")


class RefusalCounts:
    """Counts what was refused since the process started."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, what: str, error: WireError) -> None:
        """Count a refused message; ``what`` says which kind it was."""
        if self._counts[error.reason] == 0:
            # Once per reason: whoever can publish could otherwise fill the disk.
            _log.warning("refused a %s: %s (further ones are only counted)", what, error)
        self._counts[error.reason] += 1

    def counts(self) -> Mapping[str, int]:
        """By reason; a copy."""
        return dict(self._counts)


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
        self._clock = clock
        self._topics = Topics(membership.prefix)
        self.actions = Actions()
        self.refusals = RefusalCounts()
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
        self._current = CurrentRound(
            home, membership, self.sessions, self.sender, self._topics, self.actions, artifacts,
            wishes if wishes is not None else ArtifactWishes(), pace, clock=clock, rng=rng,
        )  # fmt: skip
        self._presence: bytes | None = None
        self._save_time_seconds = clock() + _TIME_SAVED_EVERY_SECONDS

    @property
    def working_on(self) -> RoundManifest | None:
        """The manifest of the round that is being fetched or trained."""
        return self._current.manifest

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
        self.sessions.connected(value)
        self.sender.connected(value)
        self._current.connected(value)

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
        self._current.tick()
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
        return min(
            self._current.next_seconds(),
            self.sessions.next_seconds(),
            self.sender.next_seconds(),
            self._save_time_seconds,
            self._intake.next_seconds(),
        )

    def take_question(self) -> TrainingJob | None:
        """A round that offers attachments, or None. :meth:`wanted` or :meth:`ended` must follow."""
        return self._current.question

    def wanted(self, names: Sequence[str]) -> None:
        """The learner's answer: the attachments to fetch before the round in question is trained.

        Raises LearnerError for a name that is not offered.
        """
        self._current.wanted(names)

    def take_job(self) -> TrainingJob | None:
        """A round to train now, or None. :meth:`trained` or :meth:`ended` must follow.

        One that selects nobody (threshold 0) is not to be trained, but to be read: the task rests,
        and the device's own model may take over its last version. :meth:`read` must follow.
        """
        return self._current.job

    def trained(self, job: TrainingJob, result: TrainedRound) -> None:
        """Commit the round's outcome, update and all, in one transaction; then send it."""
        self._current.trained(job, result)

    def read(self, job: TrainingJob, adopted: Mapping[str, NDArray[Any]] | None = None) -> None:
        """The task rests, and its last version was read.

        ``adopted``: that version as a model of the device's artifact, where it takes one over.
        """
        self._current.read(job, adopted)

    def ended(self, job: TrainingJob, outcome: RoundOutcome, detail: str) -> None:
        """The round ends here without an update; ``detail`` says why."""
        self._current.ended(job, outcome, detail)

    def _dispatch(self, topic: Topic, payload: bytes, retained: bool) -> None:
        match topic:
            case DescriptorTopic():
                self.sessions.on_descriptor(payload)
                self._retry_refused()
            case PresenceTopic():
                self._presence = payload
                self.sessions.on_presence(payload, retained=retained)
            case DownTopic():
                if retained:
                    raise WireError("retained", "nothing retained is accepted on this topic")
                self._on_down(payload)
            case ManifestTopic():
                self._intake.put(payload)
                self._try_manifest()
            case ChunkTopic(content_id, index):
                self._current.chunk(content_id, index, payload)
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
        self._current.receipted()

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
        if accepted is not None:
            self._current.take(accepted)
