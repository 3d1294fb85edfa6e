"""What the aggregator tells the devices of a task: contents, and each round."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.errors import AggregatorError
from aggregator.publish.attachments import Attachments
from aggregator.store import TaskStore
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
from device_sdk.wire.publish.topics import ChunkTopic, ManifestTopic, Topics
from device_sdk.wire.seal.broadcast import GroupKey, Publication, new_group_key
from device_sdk.wire.seal.keyring import ServingKeys
from device_sdk.wire.seal.keys import RandomBytes

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
    """What publications repeat of the task. ``artifacts``: smallest first. ``shipped``: ids of
    those that come with the SDK, so that devices have them already."""

    name: str
    cohort: str
    codec: str
    terms: TaskTerms
    artifacts: tuple[ArtifactContent, ...] = ()
    shipped: frozenset[bytes] = frozenset()


class Publisher:
    """Seals publications and stores them, so that they can be sent again after any crash.

    ``keys`` gives the serving keys of the descriptor in force; ``admission_key`` a device's key by
    its id in hexadecimal, None for one that is revoked or unknown.
    """

    def __init__(
        self,
        task: PublishedTask,
        topics: Topics,
        store: TaskStore,
        keys: Callable[[], ServingKeys],
        admission_key: Callable[[str], bytes | None],
        random_bytes: RandomBytes,
        rng: np.random.Generator,
    ) -> None:
        self._task = task
        self._topics = topics
        self._store = store
        self._keys = keys
        self._random_bytes = random_bytes
        self._rng = rng
        self._attachments = Attachments(
            task.name, task.cohort, task.codec, topics, store, admission_key, random_bytes, rng
        )

    @property
    def artifact_ids(self) -> tuple[bytes, ...]:
        """Of all artifacts and companions that the task offers."""
        pairs = ((each, each.companion) for each in self._task.artifacts)
        return tuple(one.artifact_id for pair in pairs for one in pair if one is not None)

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
        fleet = self._store.fleet
        keys = fleet.secrets.group_keys()
        key = keys[-1]
        if fleet.facts.rotation_due:
            key = new_group_key(key.epoch + 1, self._random_bytes)
            fleet.secrets.add_group_key(key)
            fleet.facts.rotation_due = False
        self._store.facts.key_epoch = key.epoch
        # What other tasks published stays readable until they publish anew.
        needed = {key.epoch, *fleet.tasks.key_epochs()}
        fleet.secrets.drop_group_keys(each.epoch for each in keys if each.epoch not in needed)
        return key

    def _seal_contents(
        self, key: GroupKey, signing: Ed25519PrivateKey, catalogue: bytes | None
    ) -> None:
        contents = self._contents(catalogue)
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

    def _contents(self, catalogue: bytes | None) -> list[tuple[ContentKind, bytes, bytes]]:
        """Kind, id and bytes of what this task publishes, each once.

        Raises AggregatorError where another task publishes the same: a content has one topic, and
        is sealed for the devices of one task.
        """
        found = {}
        if catalogue is not None:
            content_id = catalogue_id(catalogue)
            self._require_free(content_id, "catalogue", "change a title in one of the two")
            found[content_id] = (ContentKind.CATALOGUE, content_id, catalogue)
        for artifact in self._task.artifacts:
            for each in (artifact, artifact.companion):
                # One meta-network may go with several artifacts.
                if each is None or each.artifact_id in found:
                    continue
                shipped = each.artifact_id in self._task.shipped
                if shipped and self._owner(each.artifact_id) is not None:
                    continue
                self._require_free(
                    each.artifact_id,
                    f"artifact {each.artifact.manifest.name!r}",
                    "export it once more under another name",
                )
                found[each.artifact_id] = (ContentKind.ARTIFACT, each.artifact_id, each.content)
        return list(found.values())

    def _owner(self, content_id: bytes) -> str | None:
        topic = self._topics.write(ChunkTopic(content_id, 0))
        number = self._store.publications.other_owner(topic)
        return None if number is None else self._store.fleet.tasks.find(number).name

    def _require_free(self, content_id: bytes, what: str, remedy: str) -> None:
        owner = self._owner(content_id)
        if owner is not None:
            raise AggregatorError(
                f"the {what} of task {self._task.name!r} is published for task {owner!r} already, "
                f"and one content is sealed for the devices of one task: {remedy}"
            )

    def _publication(self, key: GroupKey) -> Publication:
        return Publication(key, self._task.name, self._task.cohort, self._random_bytes)


def _unsendable(error: ValueError) -> AggregatorError:
    return AggregatorError(f"the model cannot be sent: {error}; see task.broadcast_codec")
