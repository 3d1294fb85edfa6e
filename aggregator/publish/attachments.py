"""Attachments of a round's broadcast, sealed as contents of their own, once for as long as they
stay the same."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.store import TaskStore
from aggregator.store.publications import AttachmentBook, CohortKey, SealedContent
from device_sdk.wire.arrays.exchange import Attachment, Broadcast
from device_sdk.wire.arrays.tensors import Codec, encode_tensors
from device_sdk.wire.publish.content import ContentKind, seal_content
from device_sdk.wire.publish.task_messages import OfferedAttachment, write_attachment
from device_sdk.wire.publish.topics import ChunkTopic, Topics
from device_sdk.wire.seal.broadcast import GroupKey, Publication, wrap_cohort_key
from device_sdk.wire.seal.keys import RandomBytes, draw

_KEY_BYTES = 32
ATTACHMENT_PART = "attachment."
"""What the parts of attachments begin with, among the store's publications."""


@dataclass(frozen=True)
class SealedOffer:
    """What the round's terms say of attachments."""

    attachments: tuple[OfferedAttachment, ...] = ()
    cohort_keys: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Attachments:
    """Seals into the store's publications; to be used inside the transaction that opens a round.

    ``admission_key`` gives a device's, by its id in hexadecimal; None for one that is revoked or
    unknown. ``cohort``: whom the task's publications are for. ``codec``: a key of
    ``BROADCAST_CODECS``.
    """

    task: str
    cohort: str
    codec: str
    topics: Topics
    store: TaskStore
    admission_key: Callable[[str], bytes | None]
    random_bytes: RandomBytes
    rng: np.random.Generator

    def seal(
        self, broadcast: Broadcast, broadcast_id: bytes, key: GroupKey, signing: Ed25519PrivateKey
    ) -> SealedOffer:
        """Seal what is new or has other readers, and have what is gone cleared from the broker.

        Raises ValueError for arrays that the codec cannot carry.
        """
        book = self.store.attachments.load()
        if book is None:
            if not broadcast.attachments:
                return SealedOffer()
            book = AttachmentBook(draw(self.random_bytes, _KEY_BYTES))
        members = {name: self._members(each) for name, each in broadcast.cohorts.items()}
        cohorts = {
            name: self._cohort_key(book.cohorts.get(name), keys, key.epoch)
            for name, keys in members.items()
        }
        signer = signing.public_key().public_bytes_raw().hex()
        sealed: dict[str, SealedContent] = {}
        offers = []
        for name, attachment in sorted(broadcast.attachments.items()):
            cohort = cohorts.get(attachment.cohort)
            under = f"{key.epoch} {signer} {'' if cohort is None else cohort.drawn_for}"
            content_id = self._content_id(book.secret, attachment)
            known = sealed.get(content_id.hex()) or book.sealed.get(content_id.hex())
            if known is None or known.sealed_under != under:
                publication = self._publication(key, attachment.cohort, cohort)
                size = self._publish(content_id, attachment, publication, signing)
                known = SealedContent(size, under)
            sealed[content_id.hex()] = known
            offers.append(OfferedAttachment(name, content_id, known.size, attachment.cohort))
        for gone in book.sealed.keys() - sealed.keys():
            self.store.publications.replace(ATTACHMENT_PART + gone, [])
        self.store.attachments.save(AttachmentBook(book.secret, cohorts, sealed))
        wrapped = {
            name: wrap_cohort_key(cohort.key, members[name].values(), self.task, name, broadcast_id)
            for name, cohort in cohorts.items()
        }
        return SealedOffer(tuple(offers), wrapped)

    def _members(self, senders: tuple[str, ...]) -> dict[str, bytes]:
        found = {sender: self.admission_key(sender) for sender in sorted(senders)}
        return {sender: key for sender, key in found.items() if key is not None}

    def _cohort_key(
        self, known: CohortKey | None, members: Mapping[str, bytes], epoch: int
    ) -> CohortKey:
        """The same for as long as members and epoch are: who has left reads nothing new."""
        named = hashlib.sha256("".join(members).encode()).hexdigest()
        drawn_for = f"{epoch} {named}"
        if known is not None and known.drawn_for == drawn_for:
            return known
        return CohortKey(draw(self.random_bytes, _KEY_BYTES), drawn_for)

    def _content_id(self, secret: bytes, attachment: Attachment) -> bytes:
        """Of the exact arrays, whatever the codec makes of them, and of who may read them.

        Keyed: the id stands in topics, where a plain hash would let the broker test guesses.
        """
        exact = encode_tensors(attachment.tensors, Codec.FLOAT32)
        label = f"tessera/1 attachment {self.codec} {attachment.cohort}".encode()
        return hmac.digest(secret, label + b"\x00" + exact, hashlib.sha256)

    def _publication(self, key: GroupKey, name: str, cohort: CohortKey | None) -> Publication:
        if cohort is None:
            return Publication(key, self.task, self.cohort, self.random_bytes)
        return Publication(GroupKey(key.epoch, cohort.key), self.task, name, self.random_bytes)

    def _publish(
        self,
        content_id: bytes,
        attachment: Attachment,
        publication: Publication,
        signing: Ed25519PrivateKey,
    ) -> int:
        content = write_attachment(attachment.tensors, self.codec, self.rng)
        messages = seal_content(publication, signing, ContentKind.ATTACHMENT, content_id, content)
        self.store.publications.replace(
            ATTACHMENT_PART + content_id.hex(),
            [
                (self.topics.write(ChunkTopic(content_id, index)), message)
                for index, message in enumerate(messages)
            ],
        )
        return len(content)
