"""A round that this device was selected for, while what it needs is being fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from device_sdk.home.home import Home
from device_sdk.rounds.actions import Actions
from device_sdk.rounds.fetch import BroadcastFetch, ContentFetch, Fetch, Retry
from device_sdk.rounds.job import TrainingJob
from device_sdk.rounds.pace import Pace
from device_sdk.rounds.session_keeper import SessionKeeper
from device_sdk.wire.artifact_bundle import unpack_artifact
from device_sdk.wire.catalogue import NO_CATALOGUE, Catalogue, read_catalogue
from device_sdk.wire.content import ContentKind
from device_sdk.wire.errors import WireError
from device_sdk.wire.manifest import Manifest
from device_sdk.wire.task_messages import read_broadcast
from device_sdk.wire.topics import Topics

__all__ = ["NO_ARTIFACT", "OpenRound"]

NO_ARTIFACT = bytes(32)
"""The artifact id of a task that leaves it to the device: the first installed one is used."""


class OpenRound:
    """Fetches the broadcast, and artifact and catalogue where they are not here yet.

    ``artifacts``: installed ones by id. Raises ``WireError("unknown-epoch")``.
    """

    def __init__(
        self,
        manifest: Manifest,
        home: Home,
        sessions: SessionKeeper,
        topics: Topics,
        actions: Actions,
        artifacts: Mapping[bytes, Path],
        pace: Pace,
        *,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        self.manifest = manifest
        self._home = home
        self._artifacts = artifacts
        self.retry = Retry(pace, clock, rng)
        fetches: list[Fetch] = [BroadcastFetch(manifest, sessions, topics, actions)]

        def content(kind: ContentKind, content_id: bytes) -> None:
            fetches.append(ContentFetch(kind, content_id, manifest, sessions, topics, actions))

        if self._installed() is None:
            content(ContentKind.ARTIFACT, manifest.artifact_id)
        wanted = manifest.catalogue_id
        if wanted != NO_CATALOGUE and home.models.catalogue(wanted) is None:
            content(ContentKind.CATALOGUE, wanted)
        self._broadcast = b""
        self.broken: WireError | None = None
        """Why what came whole, signed by the aggregator, cannot be used all the same."""
        self._fetches = {fetch.content_id: fetch for fetch in fetches}
        for fetch in fetches:
            fetch.start()
        if not manifest.chunks:
            self._finish(fetches[0])

    @property
    def is_complete(self) -> bool:
        """Whether everything came."""
        return not self._fetches

    def add(self, content_id: bytes, index: int, message: bytes) -> None:
        """A chunk's or head's message came. Raises ``WireError``."""
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
        terms, broadcast = read_broadcast(self._broadcast, self.manifest)
        artifact = self._installed()
        assert artifact is not None
        return TrainingJob(self.manifest, terms, broadcast, self._catalogue(), artifact)

    def _finish(self, fetch: Fetch) -> None:
        fetch.stop()
        plaintext = fetch.plaintext()
        if isinstance(fetch, ContentFetch):
            self._store(fetch, plaintext)
        else:
            self._broadcast = plaintext
        del self._fetches[fetch.content_id]

    def _store(self, fetch: ContentFetch, content: bytes) -> None:
        if fetch.kind is ContentKind.ARTIFACT:
            self._home.save_artifact(fetch.content_id, unpack_artifact(content, fetch.content_id))
            return
        if hashlib.sha256(content).digest() != fetch.content_id:
            raise WireError("wrong-content", "another catalogue than the manifest names")
        read_catalogue(content)
        self._home.models.save_catalogue(content)

    def _installed(self) -> Path | None:
        wanted = self.manifest.artifact_id
        if wanted == NO_ARTIFACT:
            return next(iter(self._artifacts.values()), None)
        if wanted in self._artifacts:
            return self._artifacts[wanted]
        return self._home.artifact_folder(wanted) if self._home.has_artifact(wanted) else None

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
