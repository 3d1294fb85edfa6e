"""The one round that a device has in hand, from its manifest to how it ended here."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.home.home import Home
from device_sdk.home.membership import Membership
from device_sdk.home.round_store import RoundOutcome
from device_sdk.rounds.actions import Actions
from device_sdk.rounds.commit import commit_round, participation, read_model
from device_sdk.rounds.intake import Accepted
from device_sdk.rounds.open_round import OpenRound
from device_sdk.rounds.pace import Pace
from device_sdk.rounds.sender import Sender
from device_sdk.rounds.session import SessionKeeper
from device_sdk.train.affordable import ArtifactWishes
from device_sdk.train.job import RECEIPT_METHODS, Declined, TrainedRound, TrainingJob
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.topics import Topics

_log = logging.getLogger("tessera.device")


class CurrentRound:
    """At most one round: fetched, asked about, trained, committed, and concluded in any case.

    Args:
        artifacts: folders of artifacts that are installed with the device, by their id.
        wishes: which of a task's artifacts to take.
        clock: monotonic seconds.
        rng: jitter.
    """

    def __init__(
        self,
        home: Home,
        membership: Membership,
        sessions: SessionKeeper,
        sender: Sender,
        topics: Topics,
        actions: Actions,
        artifacts: Mapping[bytes, Path],
        wishes: ArtifactWishes,
        pace: Pace,
        *,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        self._home = home
        self._membership = membership
        self._sessions = sessions
        self._sender = sender
        self._topics = topics
        self._actions = actions
        self._artifacts = artifacts
        self._wishes = wishes
        self._pace = pace
        self._clock = clock
        self._rng = rng
        self._connected = False
        self._held_back = False
        self._round: OpenRound | None = None
        self.question: TrainingJob | None = None
        """It offers attachments: :meth:`wanted` or :meth:`ended` must follow."""
        self.job: TrainingJob | None = None
        """It is complete: :meth:`trained`, :meth:`read` or :meth:`ended` must follow."""

    @property
    def manifest(self) -> RoundManifest | None:
        """Of the round in hand; None for none."""
        return None if self._round is None else self._round.manifest

    def connected(self, value: bool) -> None:
        """The broker's connection came or went."""
        self._connected = value
        if value and self._round is not None:
            self._round.retry.progressed()  # the link subscribes again by itself

    def take(self, accepted: Accepted) -> None:
        """A verified manifest came: begin its round, or conclude it where there is nothing to do.

        Raises ``WireError`` where the broadcast's key is missing, or there is nothing to fetch.
        """
        manifest = accepted.manifest
        if self._round is not None:
            if self._round.manifest == manifest:
                return  # shown again, as after a reconnection
            self._conclude(self._round.manifest, RoundOutcome.TOO_LATE, "the next round opened")
        # Only for news: a broker that repeats a manifest must not shorten the waits.
        self._sessions.went_well()
        if not accepted.selected and not self._is_wanted_to_read(manifest):
            self._conclude(manifest, RoundOutcome.NOT_SELECTED)
        elif self._is_past(manifest.deadline_unix_seconds):
            self._conclude(manifest, RoundOutcome.TOO_LATE, "the deadline was over on arrival")
        elif accepted.selected and self._sender.obstacle:
            self._hold_back(manifest, self._sender.obstacle)
        else:
            self._held_back = False
            self._begin(manifest)

    def chunk(self, content_id: bytes, index: int, payload: bytes) -> None:
        """A chunk's or head's message came. Raises ``WireError`` for one that cannot be used."""
        round_ = self._round
        if round_ is None or self.job is not None:
            return  # on its way while we unsubscribed
        try:
            round_.add(content_id, index, payload)
        except Declined as reason:
            self._conclude(round_.manifest, RoundOutcome.DECLINED, str(reason))
            return
        except WireError as error:
            if error.reason == "unknown-epoch":
                self._sessions.reopen()
            if round_.broken is not None:
                self._conclude(round_.manifest, RoundOutcome.FAILED, str(error))
            raise
        self._advance(round_)

    def receipted(self) -> None:
        """An update got its receipt: the round may have waited for it."""
        if self._round is not None and self.job is None and self.question is None:
            self._advance(self._round)

    def tick(self) -> None:
        """Ask again for what did not come, or give up at the deadline."""
        round_ = self._round
        if round_ is None or self.job is not None:
            return
        if self._is_past(round_.manifest.deadline_unix_seconds):
            what = "receipts" if round_.is_complete else "chunks"
            self._conclude(round_.manifest, RoundOutcome.TOO_LATE, f"not all {what} came in time")
        elif self._asks_again(round_) and round_.retry.due():
            round_.ask_again()

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`tick` has something to do; infinite for never."""
        round_ = self._round
        if round_ is None or self.job is not None:
            return math.inf
        deadline = self._sessions.time.clock_seconds(round_.manifest.deadline_unix_seconds)
        retry = round_.retry.next_seconds if self._asks_again(round_) else math.inf
        return retry if deadline is None else min(retry, deadline)

    def wanted(self, names: Sequence[str]) -> None:
        """The learner's answer to :attr:`question`: the attachments to fetch before training.

        Raises LearnerError for a name that is not offered.
        """
        if self._round is not None and self.question is not None:
            self._round.ask_for(names)
            self.question = None
            self._advance(self._round)

    def trained(self, job: TrainingJob, result: TrainedRound) -> None:
        """Commit the round's outcome, update and all, in one transaction; then send it."""
        manifest = job.manifest
        if self._is_past(manifest.deadline_unix_seconds):
            if result.capability is not None:
                self._home.models.save_capability(result.capability)
            self.ended(job, RoundOutcome.TOO_LATE, f"training took {result.seconds:.1f} s")
            return
        row = commit_round(
            self._home,
            self._membership.grant.device_id,
            job,
            result,
            self._sessions.time.largest_unix_seconds,
        )
        self._close()
        self._sender.add(row)

    def read(self, job: TrainingJob, adopted: Mapping[str, NDArray[Any]] | None = None) -> None:
        """The task rests, and its last version was read; see :func:`read_model`."""
        with self._home.database.transaction():
            read_model(self._home, job, adopted)
            self._conclude(job.manifest, RoundOutcome.READ)

    def ended(self, job: TrainingJob, outcome: RoundOutcome, detail: str) -> None:
        """The round ends here without an update; ``detail`` says why."""
        self._conclude(job.manifest, outcome, detail)

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

    def _begin(self, manifest: RoundManifest) -> None:
        try:
            self._round = OpenRound(
                manifest,
                self._home,
                self._membership,
                self._sessions,
                self._topics,
                self._actions,
                self._artifacts,
                self._wishes,
                self._pace,
                clock=self._clock,
                rng=self._rng,
            )
        except WireError as error:
            if error.reason == "truncated":
                self._conclude(manifest, RoundOutcome.FAILED, str(error))
            raise

    def _advance(self, round_: OpenRound) -> None:
        if not round_.is_complete:
            return
        try:
            job = round_.job()
        except WireError as error:
            # Signed by the aggregator and unusable all the same: asking again would not help.
            self._conclude(round_.manifest, RoundOutcome.FAILED, str(error))
            raise
        if round_.manifest.threshold == 0 and not self._has_own_model(job):
            self.read(job)
        elif self._must_hear_first(job):
            return  # until :meth:`receipted`
        elif round_.asks:
            self.question = job
        else:
            self.job = job

    def _must_hear_first(self, job: TrainingJob) -> bool:
        """Whether the learner has to know first what of its own counted."""
        trains = job.manifest.threshold > 0
        return trains and job.terms.method in RECEIPT_METHODS and self._sender.waits

    def _asks_again(self, round_: OpenRound) -> bool:
        return self._connected and not round_.is_complete

    def _has_own_model(self, job: TrainingJob) -> bool:
        return self._home.models.learner_artifact(job.manifest.task) is not None

    def _conclude(self, manifest: RoundManifest, outcome: RoundOutcome, detail: str = "") -> None:
        self._close()
        self._home.rounds.conclude(participation(manifest, outcome, detail))

    def _close(self) -> None:
        if self._round is not None:
            self._round.stop()
        self._round = self.job = self.question = None

    def _is_past(self, unix_seconds: int) -> bool:
        now = self._sessions.time.now()
        return now is not None and now >= unix_seconds
