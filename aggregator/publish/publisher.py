"""What the aggregator tells everybody: descriptor, presence, contents, and each round."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.errors import AggregatorError
from aggregator.publish.attachments import Attachments
from aggregator.store import Store
from aggregator.store.rounds import RoundRow
from device_sdk.artifact import MANIFEST_FILE, Artifact, ArtifactError, load_artifact
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.arrays.tensors import require_encodable
from device_sdk.wire.publish.artifact_bundle import pack_artifact
from device_sdk.wire.publish.catalogue import NO_CATALOGUE, catalogue_id
from device_sdk.wire.publish.content import ContentKind, seal_content
from device_sdk.wire.publish.manifest import RoundManifest, seal_chunks, write_manifest
from device_sdk.wire.publish.task_messages import (
    BROADCAST_CODECS,
    OfferedArtifact,
    TaskTerms,
    write_broadcast,
)
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    ManifestTopic,
    PresenceTopic,
    TasksTopic,
    Topics,
)
from device_sdk.wire.seal.broadcast import GroupKey, Publication, new_group_key
from device_sdk.wire.seal.keyring import ServingKeys
from device_sdk.wire.seal.keys import RandomBytes
from device_sdk.wire.seal.presence import Presence, sign_presence
from device_sdk.wire.seal.tasks import ServedTasks, sign_tasks

# An artifact's folder, checked and packed for sending.


@dataclass(frozen=True)
class ArtifactContent:
    """An artifact as it travels, and as a method reads its first parameters.

    ``companion``: the artifact that goes with it, if any.
    """

    artifact_id: bytes
    content: bytes
    artifact: Artifact
    companion: ArtifactContent | None = None

    def offer(self) -> OfferedArtifact:
        """What devices are told of it."""
        return OfferedArtifact(
            self.artifact_id,
            self.artifact.manifest.name,
            len(self.content),
            None if self.companion is None else self.companion.offer(),
        )


def read_artifacts(
    folders: tuple[Path, ...], companions: tuple[Path, ...]
) -> tuple[ArtifactContent, ...]:
    """All artifacts of a task. Raises AggregatorError."""
    if not companions:
        return tuple(read_artifact(folder) for folder in folders)
    return tuple(
        read_artifact(folder, read_artifact(companion))
        for folder, companion in zip(folders, companions, strict=True)
    )


def read_artifact(folder: Path, companion: ArtifactContent | None = None) -> ArtifactContent:
    """Check an artifact as a device would, and pack it. Raises AggregatorError."""
    try:
        artifact = load_artifact(folder)
        names = [MANIFEST_FILE, *artifact.manifest.files]
        files = {name: (folder / name).read_bytes() for name in names}
        content = pack_artifact(files)
    except (ArtifactError, OSError, ValueError) as error:
        raise AggregatorError(f"the artifact {folder} cannot be published: {error}") from None
    artifact_id = hashlib.sha256(files[MANIFEST_FILE]).digest()
    return ArtifactContent(artifact_id, content, artifact, companion)


@dataclass(frozen=True)
class PublishedTask:
    """What publications repeat of the task. ``artifacts``: smallest first."""

    name: str
    cohort: str
    codec: str
    terms: TaskTerms
    artifacts: tuple[ArtifactContent, ...] = ()


class Publisher:
    """Seals publications and stores them, so that they can be sent again after any crash.

    ``keys`` gives the serving keys of the descriptor in force; ``admission_key`` a device's key by
    its id in hexadecimal, None for one that is revoked or unknown.
    """

    def __init__(
        self,
        task: PublishedTask,
        topics: Topics,
        store: Store,
        presence: Presence,
        served: ServedTasks,
        keys: Callable[[], ServingKeys],
        admission_key: Callable[[str], bytes | None],
        random_bytes: RandomBytes,
        rng: np.random.Generator,
    ) -> None:
        self._task = task
        self._topics = topics
        self._store = store
        self._presence = presence
        self._served = served
        self._keys = keys
        self._random_bytes = random_bytes
        self._rng = rng
        self._attachments = Attachments(
            task.name, task.cohort, task.codec, topics, store, admission_key, random_bytes, rng
        )

    def standing(self) -> list[tuple[str, bytes]]:
        """Topics and messages of descriptor, tasks and presence."""
        descriptor = self._keys().descriptor.message
        return [(self._topics.write(DescriptorTopic()), descriptor), self.tasks(), self.presence()]

    def tasks(self) -> tuple[str, bytes]:
        """Topic and message of the tasks served: sent before the presence, on which devices act."""
        keys = self._keys()
        message = sign_tasks(self._served, keys.descriptor, keys.signing)
        return self._topics.write(TasksTopic()), message

    def presence(self) -> tuple[str, bytes]:
        """Topic and message of the presence."""
        keys = self._keys()
        message = sign_presence(self._presence, keys.descriptor, keys.signing)
        return self._topics.write(PresenceTopic()), message

    def require_publishable(self, broadcast: Broadcast) -> None:
        """Raises AggregatorError where the task's codec cannot carry the broadcast's values."""
        codec = BROADCAST_CODECS[self._task.codec]
        try:
            require_encodable(broadcast.tensors, codec)
            for attachment in broadcast.attachments.values():
                require_encodable(attachment.tensors, codec)
        except ValueError as error:
            raise _unsendable(error) from None

    def seal_round(self, row: RoundRow, broadcast: Broadcast) -> None:
        """Store a round's publication; called inside the transaction that opens the round.

        The group key is replaced first where that is due, and contents are sealed anew with it.
        """
        key = self._current_key()
        serving = self._keys()
        signing = serving.signing
        artifacts = self._task.artifacts
        catalogue = self._store.facts.catalogue
        self._seal_contents(key, signing, catalogue)
        publication = self._publication(key)
        if row.threshold == 0:
            broadcast = replace(broadcast, attachments={}, cohorts={})  # nobody trains any more
        try:
            offer = self._attachments.seal(broadcast, publication.broadcast_id, key, signing)
            terms = replace(
                self._task.terms, attachments=offer.attachments, cohort_keys=offer.cohort_keys
            )
            plaintext = write_broadcast(broadcast, terms, self._task.codec, self._rng)
        except ValueError as error:
            raise _unsendable(error) from None
        chunks, digests = seal_chunks(publication, plaintext)
        manifest = RoundManifest(
            root_fingerprint=serving.descriptor.root_fingerprint,
            task=self._task.name,
            cohort=self._task.cohort,
            generation=row.generation,
            round=row.round,
            version=broadcast.version,
            artifact_id=artifacts[0].artifact_id if artifacts else bytes(32),
            catalogue_id=NO_CATALOGUE if catalogue is None else catalogue_id(catalogue),
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

    def _seal_contents(
        self, key: GroupKey, signing: Ed25519PrivateKey, catalogue: bytes | None
    ) -> None:
        contents = []
        if catalogue is not None:
            contents.append((ContentKind.CATALOGUE, catalogue_id(catalogue), catalogue))
        for artifact in self._task.artifacts:
            for each in (artifact, artifact.companion):
                if each is not None:
                    contents.append((ContentKind.ARTIFACT, each.artifact_id, each.content))
        # One meta-network may go with several artifacts.
        contents = list({each[1]: each for each in contents}.values())
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


def _unsendable(error: ValueError) -> AggregatorError:
    return AggregatorError(f"the model cannot be sent: {error}; see task.broadcast_codec")
