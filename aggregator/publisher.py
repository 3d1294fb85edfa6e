"""What the aggregator tells everybody: descriptor, presence, contents, and each round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.errors import AggregatorError
from aggregator.store import Store
from aggregator.store.rounds import RoundRow
from device_sdk.wire.broadcast import Publication
from device_sdk.wire.catalogue import catalogue_id
from device_sdk.wire.chunk_set import seal_chunks
from device_sdk.wire.content import ContentKind, seal_content
from device_sdk.wire.exchange import Broadcast
from device_sdk.wire.group_key import GroupKey, new_group_key
from device_sdk.wire.keyring import ServingKeys
from device_sdk.wire.keys import RandomBytes
from device_sdk.wire.manifest import Manifest, write_manifest
from device_sdk.wire.presence import Presence, sign_presence
from device_sdk.wire.task_messages import TaskTerms, write_broadcast
from device_sdk.wire.topics import (
    ChunkTopic,
    DescriptorTopic,
    ManifestTopic,
    PresenceTopic,
    Topics,
)

__all__ = ["ArtifactContent", "PublishedTask", "Publisher"]


@dataclass(frozen=True)
class ArtifactContent:
    """An artifact as it travels."""

    artifact_id: bytes
    content: bytes


@dataclass(frozen=True)
class PublishedTask:
    """What publications repeat of the task."""

    name: str
    cohort: str
    codec: str
    terms: TaskTerms
    artifact: ArtifactContent | None


class Publisher:
    """Seals publications and stores them, so that they can be sent again after any crash.

    ``keys`` gives the serving keys of the descriptor in force.
    """

    def __init__(
        self,
        task: PublishedTask,
        topics: Topics,
        store: Store,
        presence: Presence,
        keys: Callable[[], ServingKeys],
        random_bytes: RandomBytes,
        rng: np.random.Generator,
    ) -> None:
        self._task = task
        self._topics = topics
        self._store = store
        self._presence = presence
        self._keys = keys
        self._random_bytes = random_bytes
        self._rng = rng

    def standing(self) -> list[tuple[str, bytes]]:
        """Topics and messages of descriptor and presence."""
        keys = self._keys()
        return [
            (self._topics.write(DescriptorTopic()), keys.descriptor.message),
            (
                self._topics.write(PresenceTopic()),
                sign_presence(self._presence, keys.descriptor, keys.signing),
            ),
        ]

    def seal_round(self, row: RoundRow, broadcast: Broadcast) -> None:
        """Store a round's publication; called inside the transaction that opens the round.

        The group key is replaced first where that is due, and contents are sealed anew with it.
        """
        key = self._current_key()
        signing = self._keys().signing
        artifact = self._task.artifact
        catalogue = self._store.facts.catalogue
        if catalogue is None:
            raise AggregatorError("a round was opened without a catalogue")
        self._seal_contents(key, signing, catalogue)
        try:
            plaintext = write_broadcast(broadcast, self._task.terms, self._task.codec, self._rng)
        except ValueError as error:
            raise AggregatorError(
                f"the model cannot be sent: {error}; see task.broadcast_codec"
            ) from None
        publication = self._publication(key)
        chunks, digests = seal_chunks(publication, plaintext)
        manifest = Manifest(
            root_fingerprint=self._store.facts.root_fingerprint,
            task=self._task.name,
            cohort=self._task.cohort,
            generation=row.generation,
            round=row.round,
            version=broadcast.version,
            artifact_id=bytes(32) if artifact is None else artifact.artifact_id,
            catalogue_id=catalogue_id(catalogue),
            broadcast_id=publication.broadcast_id,
            key_epoch=key.epoch,
            sampling_seed=row.seed,
            threshold=row.threshold,
            deadline_unix_seconds=int(row.deadline_unix_seconds),
            expiry_unix_seconds=int(row.deadline_unix_seconds),
            codec=self._task.codec,
            length=len(plaintext),
            chunks=digests,
        )
        messages = [
            (self._topics.write(ChunkTopic(publication.broadcast_id, index)), chunk)
            for index, chunk in enumerate(chunks)
        ]
        # Last, so that whoever sees it finds what it names.
        sealed = publication.seal_manifest(write_manifest(manifest), signing)
        topic = ManifestTopic(self._task.name, self._task.cohort)
        self._store.publications.replace("round", [*messages, (self._topics.write(topic), sealed)])

    def _current_key(self) -> GroupKey:
        key = self._store.secrets.group_keys()[-1]
        if self._store.facts.rotation_due:
            key = new_group_key(key.epoch + 1, self._random_bytes)
            self._store.secrets.add_group_key(key)
            self._store.secrets.drop_group_keys_below(key.epoch)
            self._store.facts.rotation_due = False
        return key

    def _seal_contents(self, key: GroupKey, signing: Ed25519PrivateKey, catalogue: bytes) -> None:
        contents = [(ContentKind.CATALOGUE, catalogue_id(catalogue), catalogue)]
        if self._task.artifact is not None:
            artifact = self._task.artifact
            contents.append((ContentKind.ARTIFACT, artifact.artifact_id, artifact.content))
        # Heads are signed: by another key after a rotation.
        signer = signing.public_key().public_bytes_raw().hex()
        ids = ",".join(content_id.hex() for _, content_id, _ in contents)
        label = f"{key.epoch} {signer} {ids}"
        if self._store.facts.sealed_contents == label:
            return
        messages = []
        for kind, content_id, content in contents:
            sealed = seal_content(self._publication(key), signing, kind, content_id, content)
            messages += [
                (self._topics.write(ChunkTopic(content_id, index)), message)
                for index, message in enumerate(sealed)
            ]
        self._store.publications.replace("contents", messages)
        self._store.facts.sealed_contents = label

    def _publication(self, key: GroupKey) -> Publication:
        return Publication(key, self._task.name, self._task.cohort, self._random_bytes)
