"""A round that this device was selected for, while what it needs is being fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from device_sdk.home.home import Home
from device_sdk.home.membership import Membership
from device_sdk.methods.learner import LearnerError
from device_sdk.rounds.actions import Actions
from device_sdk.rounds.fetch import BroadcastFetch, ContentFetch, Fetch, Retry
from device_sdk.rounds.pace import Pace
from device_sdk.rounds.session import SessionKeeper
from device_sdk.train.affordable import ArtifactWishes
from device_sdk.train.job import LocalArtifact, TrainingJob
from device_sdk.wire.arrays.exchange import Attachment, Broadcast
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.artifact_bundle import unpack_artifact
from device_sdk.wire.publish.catalogue import NO_CATALOGUE, Catalogue, read_catalogue
from device_sdk.wire.publish.content import ContentKind
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.task_messages import (
    OfferedArtifact,
    read_attachment,
    read_broadcast,
)
from device_sdk.wire.publish.terms import OfferedAttachment, TaskTerms
from device_sdk.wire.publish.topics import Topics
from device_sdk.wire.seal.group_key import unwrap_cohort_key

# What a round's terms offer to one device: attachments that it may read, and the keys to them.


@dataclass(frozen=True, slots=True)
class Offer:
    """``readable`` by name; ``keys`` by cohort, of the cohorts that this device belongs to."""

    readable: Mapping[str, OfferedAttachment]
    keys: Mapping[str, bytes]

    @property
    def sizes(self) -> dict[str, int]:
        """By name, the bytes to fetch."""
        return {name: each.size for name, each in self.readable.items()}

    def content_ids(self) -> set[bytes]:
        """Of all that is readable."""
        return {each.content_id for each in self.readable.values()}


def read_offer(terms: TaskTerms, manifest: RoundManifest, membership: Membership) -> Offer:
    """The attachments that this device may read. Raises ``WireError``: ``bad-tag``, ``bad-field``.

    ``bad-field`` for a content that two attachments name with different sizes or readers.
    """
    keys = {}
    for cohort, wrapped in terms.cohort_keys.items():
        key = unwrap_cohort_key(
            wrapped, membership.grant.admission_key, manifest.task, cohort, manifest.broadcast_id
        )
        if key is not None:
            keys[cohort] = key
    seen: dict[bytes, OfferedAttachment] = {}
    for each in terms.attachments:
        other = seen.setdefault(each.content_id, each)
        if (other.size, other.cohort) != (each.size, each.cohort):
            raise WireError("bad-field", "two attachments disagree on one content")
    readable = {
        each.name: each for each in terms.attachments if not each.cohort or each.cohort in keys
    }
    return Offer(readable, keys)


NO_ARTIFACT = bytes(32)
"""The artifact id of a task that leaves it to the device: the first installed one is used."""


class OpenRound:
    """Fetches the broadcast and the catalogue, then the artifacts that its terms list and this
    device takes, and, after :meth:`ask_for`, attachments. What is here already is not fetched.

    ``installed``: artifacts that came with the installation, by id.
    Raises ``WireError``: ``unknown-epoch``, ``truncated``.
    """

    def __init__(
        self,
        manifest: RoundManifest,
        home: Home,
        membership: Membership,
        sessions: SessionKeeper,
        topics: Topics,
        actions: Actions,
        installed: Mapping[bytes, Path],
        wishes: ArtifactWishes,
        pace: Pace,
        *,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        if not manifest.chunks:
            raise WireError("truncated", "a broadcast without chunks has no terms")
        self.manifest = manifest
        self._home = home
        self._membership = membership
        self._sessions = sessions
        self._topics = topics
        self._actions = actions
        self._installed = installed
        self._wishes = wishes
        self.retry = Retry(pace, clock, rng)
        self.broken: WireError | None = None
        """Why what came whole, signed by the aggregator, cannot be used all the same."""
        self._terms: TaskTerms | None = None
        self._broadcast: Broadcast | None = None
        self._offer = Offer({}, {})
        self._wanted: tuple[str, ...] = ()
        self._artifacts: tuple[LocalArtifact, ...] = ()
        self.asks = False
        """Whether the learner has yet to say which attachments it wants."""
        self._fetches: dict[bytes, Fetch] = {}
        self._begin(BroadcastFetch(manifest, sessions, topics, actions))
        wanted = manifest.catalogue_id
        if wanted != NO_CATALOGUE and home.models.catalogue(wanted) is None:
            self._fetch_content(ContentKind.CATALOGUE, wanted)

    @property
    def is_complete(self) -> bool:
        """Whether all came that is known to be needed."""
        return not self._fetches

    def add(self, content_id: bytes, index: int, message: bytes) -> None:
        """A chunk's or head's message came. Raises ``WireError``, :class:`Declined`."""
        fetch = self._fetches.get(content_id)
        if fetch is None:
            return
        complete = fetch.add(index, message)
        self.retry.progressed()
        if complete:
            try:
                self._finish(fetch)
            except WireError as error:
                self.broken = error
                raise

    def ask_for(self, names: Sequence[str]) -> None:
        """The learner wants these attachments. Raises LearnerError for one that is not offered."""
        unknown = [name for name in names if name not in self._offer.readable]
        if unknown:
            raise LearnerError(f"the learner wants {unknown[0]!r}, which is not offered to it")
        self.asks = False
        self._wanted = tuple(dict.fromkeys(names))
        for name in self._wanted:
            offered = self._offer.readable[name]
            here = self._home.attachments.content(offered.content_id) is not None
            if not here and offered.content_id not in self._fetches:
                self._fetch_content(ContentKind.ATTACHMENT, offered.content_id, offered.cohort)
        self.retry.progressed()

    def ask_again(self) -> None:
        """Subscribe again to what is missing."""
        for fetch in self._fetches.values():
            fetch.start()

    def stop(self) -> None:
        """End the subscriptions."""
        for fetch in self._fetches.values():
            fetch.stop()

    def job(self) -> TrainingJob:
        """The training job, once complete. Raises ``WireError``: ``bad-catalogue``, or parsers'."""
        assert self._terms is not None and self._broadcast is not None
        broadcast = replace(
            self._broadcast,
            offered=self._offer.sizes,
            attachments={name: self._attachment(name) for name in self._wanted},
        )
        return TrainingJob(
            self.manifest, self._terms, broadcast, self._catalogue(), self._artifacts
        )

    def _begin(self, fetch: Fetch) -> None:
        self._fetches[fetch.content_id] = fetch
        fetch.start()

    def _fetch_content(self, kind: ContentKind, content_id: bytes, cohort: str = "") -> None:
        self._begin(
            ContentFetch(
                kind,
                content_id,
                self.manifest,
                self._sessions,
                self._topics,
                self._actions,
                cohort=cohort,
                cohort_key=self._offer.keys[cohort] if cohort else None,
            )
        )

    def _finish(self, fetch: Fetch) -> None:
        fetch.stop()
        plaintext = fetch.plaintext()
        if isinstance(fetch, ContentFetch):
            self._store(fetch, plaintext)
        else:
            self._take_broadcast(plaintext)
        del self._fetches[fetch.content_id]  # last: what could not be stored is fetched again

    def _take_broadcast(self, plaintext: bytes) -> None:
        self._terms, self._broadcast = read_broadcast(plaintext, self.manifest)
        if self.manifest.threshold == 0:
            # Nobody trains: what is here will do.
            self._artifacts = tuple(
                self._local(each) for each in self._terms.artifacts if self._is_here(each)
            )
            return
        self._offer = read_offer(self._terms, self.manifest, self._membership)
        self._home.attachments.keep_only(self._offer.content_ids())
        self.asks = bool(self._offer.readable)
        self._artifacts = self._chosen_artifacts(self._terms)
        picked = {each.artifact_id for each in self._artifacts}
        for each in self._terms.artifacts:
            if each.artifact_id in picked:
                self._need_artifact(each.artifact_id)
                if each.companion is not None:
                    self._need_artifact(each.companion.artifact_id)
        if not self._terms.artifacts:
            self._need_artifact(self._artifacts[0].artifact_id)

    def _need_artifact(self, artifact_id: bytes) -> None:
        if not self._folder(artifact_id).is_dir() and artifact_id not in self._fetches:
            self._fetch_content(ContentKind.ARTIFACT, artifact_id)

    def _chosen_artifacts(self, terms: TaskTerms) -> tuple[LocalArtifact, ...]:
        """Those of the terms that this device takes; without any, the manifest's."""
        if terms.artifacts:
            return tuple(self._local(each) for each in self._wishes.pick(terms.artifacts))
        wanted = self.manifest.artifact_id
        if wanted == NO_ARTIFACT:
            if not self._installed:
                raise WireError("no-artifact", "the task names no artifact, and none is installed")
            wanted = next(iter(self._installed))
        return (LocalArtifact(wanted, "", self._folder(wanted)),)

    def _local(self, offered: OfferedArtifact) -> LocalArtifact:
        companion = offered.companion
        return LocalArtifact(
            offered.artifact_id,
            offered.name,
            self._folder(offered.artifact_id),
            None if companion is None else self._folder(companion.artifact_id),
        )

    def _is_here(self, offered: OfferedArtifact) -> bool:
        local = self._local(offered)
        return local.folder.is_dir() and (local.companion is None or local.companion.is_dir())

    def _folder(self, artifact_id: bytes) -> Path:
        return self._installed.get(artifact_id) or self._home.artifact_folder(artifact_id)

    def _store(self, fetch: ContentFetch, content: bytes) -> None:
        match fetch.kind:
            case ContentKind.ARTIFACT:
                files = unpack_artifact(content, fetch.content_id)
                self._home.save_artifact(fetch.content_id, files)
            case ContentKind.ATTACHMENT:
                read_attachment(content, fetch.cohort)
                self._home.attachments.save(fetch.content_id, content)
            case ContentKind.CATALOGUE:
                if hashlib.sha256(content).digest() != fetch.content_id:
                    raise WireError("wrong-content", "another catalogue than the manifest names")
                read_catalogue(content)
                self._home.models.save_catalogue(content)

    def _attachment(self, name: str) -> Attachment:
        offered = self._offer.readable[name]
        content = self._home.attachments.content(offered.content_id)
        assert content is not None, "fetched before, or the round would not be complete"
        return read_attachment(content, offered.cohort)

    def _catalogue(self) -> Catalogue | None:
        content = self._home.models.catalogue(self.manifest.catalogue_id)
        if content is None:
            return None
        catalogue = read_catalogue(content)
        last = self._home.models.last_catalogue(self.manifest.task)
        if last is None or last[1] == self.manifest.catalogue_id:
            return catalogue
        generation, catalogue_id = last
        before = self._home.models.catalogue(catalogue_id)
        if before is None:
            return catalogue
        older = read_catalogue(before)
        restored = self.manifest.generation > generation and older.extends(catalogue)
        if not catalogue.extends(older) and not restored:
            raise WireError("bad-catalogue", "the catalogue changes what its rows stand for")
        return catalogue
