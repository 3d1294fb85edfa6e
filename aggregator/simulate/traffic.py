"""What a round would be as messages: a broadcast as devices read it, and the bytes of everything.

Broadcasts and updates are really encoded, so that what the codecs cost is in the model. Seals are
counted, not made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from aggregator.task.file import Task
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.manifest import (
    CHUNK_BYTES,
    RoundManifest,
    chunk_count,
)
from device_sdk.wire.publish.receipts import UpdateIdentity, with_report, write_update
from device_sdk.wire.publish.report import Details, Report, ReportedOutcome
from device_sdk.wire.publish.task_messages import (
    TaskTerms,
    read_attachment,
    read_broadcast,
    write_attachment,
    write_broadcast,
)
from device_sdk.wire.seal.session import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    TAG_BYTES,
    padded_length,
)

# A chunk's head, nonce and tag; a manifest's beside its body, with the signature.
_CHUNK_SEAL_BYTES = 54
_MANIFEST_SEAL_BYTES = 122
_ID = bytes(32)
_TYPICAL = ("0.1.0", "1.24.0", "linux-x86_64")
"""What a device says of itself."""


def sealed_bytes(payload: int) -> int:
    """Bytes of the envelopes that carry a payload, in fragments where one is not enough."""
    around = HEADER_BYTES + TAG_BYTES
    most = MAX_MESSAGE_BYTES - around - 64
    whole, rest = divmod(payload, most)
    return whole * MAX_MESSAGE_BYTES + (around + padded_length(rest, most + 1) if rest else 0)


@dataclass(frozen=True, slots=True)
class PublishedRound:
    """A round as its devices receive it; goes to other processes as it is.

    Attributes:
        manifest: names the round, its version, and whom it selects.
        plaintext: of the broadcast, as its chunks would hold it.
        attachments: by name, the content and who may read it ("" for everybody).
        cohorts: by cohort, the names of the devices in it.
    """

    manifest: RoundManifest
    plaintext: bytes
    attachments: Mapping[str, tuple[bytes, str]] = field(default_factory=dict)
    cohorts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def down_bytes(self) -> int:
        """Of manifest and chunks, sealed: what each device of the round receives."""
        manifest = len(encode(self.manifest)) + _MANIFEST_SEAL_BYTES
        return manifest + sealed_content_bytes(len(self.plaintext))

    def read(self) -> tuple[TaskTerms, Broadcast]:
        """What a device makes of it."""
        return read_broadcast(self.plaintext, self.manifest)

    def offered(self) -> Broadcast:
        """Attachments and cohorts, as a device's learner may fetch them."""
        number, version = self.manifest.round, self.manifest.version
        read = {
            name: read_attachment(content, cohort)
            for name, (content, cohort) in self.attachments.items()
        }
        return Broadcast(number, version, {}, attachments=read, cohorts=self.cohorts)


def sealed_content_bytes(length: int) -> int:
    """Of the chunks of so many bytes."""
    return length + chunk_count(length) * _CHUNK_SEAL_BYTES


def publish(
    task: Task,
    terms: TaskTerms,
    opened: Broadcast,
    threshold: int,
    rng: np.random.Generator,
) -> PublishedRound:
    """The round as the aggregator would publish it. ``rng`` draws the sampling seed, and rounds
    where the codec does. Raises ValueError where the codec cannot carry the model."""
    seed = rng.bytes(32)
    plaintext = write_broadcast(opened, terms, task.broadcast_codec, rng)
    chunks = [plaintext[at : at + CHUNK_BYTES] for at in range(0, len(plaintext), CHUNK_BYTES)]
    manifest = RoundManifest(
        root_fingerprint=bytes(16),
        task=task.name,
        cohort=task.cohort,
        generation=1,
        round=opened.round_id,
        version=opened.version,
        artifact_id=terms.artifacts[0].artifact_id if terms.artifacts else _ID,
        catalogue_id=_ID,
        broadcast_id=_ID,
        key_epoch=1,
        sampling_seed=seed,
        threshold=threshold,
        deadline_unix_seconds=int(task.round.deadline_seconds),
        opened_unix_seconds=0,
        codec=task.broadcast_codec,
        length=len(plaintext),
        chunks=tuple(hashlib.sha256(chunk).digest() for chunk in chunks),
    )
    attachments = {
        name: (write_attachment(each, task.broadcast_codec, rng), each.cohort)
        for name, each in opened.attachments.items()
    }
    return PublishedRound(manifest, plaintext, attachments, dict(opened.cohorts))


def update_bytes(
    device: bytes, manifest: RoundManifest, option: str, evaluation: bytes, body: bytes
) -> int:
    """Of the envelopes that carry an update and what its device tells beside it."""
    identity = UpdateIdentity(device, manifest.task, manifest.generation, manifest.round)
    report = bytes(_report_bytes(option, len(evaluation)))
    return sealed_bytes(len(write_update(identity, with_report(report, body))))


@lru_cache(maxsize=4096)
def _report_bytes(option: str, evaluation_bytes: int) -> int:
    """Of a report with an evaluation of so many bytes; apart from it, few differ."""
    details = Details(*_TYPICAL, option, 1.0, 100_000)
    report = Report(ReportedOutcome.TRAINED, "", details, bytes(evaluation_bytes))
    return len(encode(report))
