"""Contents: artifacts, catalogues, attachments; sealed like broadcasts, found by their content id.

A content is published as a *head* and chunks, all retained, on the chunk topics of its content id:
the head at index 0, chunk i at index i + 1. The head is a message of the manifest's type whose
signed body is a :class:`ContentHead`; the chunks are a publication's, under
the broadcast id and the key epoch that stand outside the head.

A content is sealed for the devices of one task and cohort, or, where several tasks use it, for
:data:`SHARED`: by its id it can stand at the broker only once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from device_sdk.artifact import MANIFEST_FILE, ArtifactError, Manifest
from device_sdk.fields import Key, Within
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Record, decode, encode
from device_sdk.wire.publish.manifest import (
    CHUNK_BYTES,
    MAX_BODY_BYTES,
    MOST_CHUNKS,
    Chunks,
    Digest,
    require_chunks,
    seal_chunks,
)
from device_sdk.wire.seal.broadcast import (
    BroadcastKeys,
    GroupKey,
    Publication,
    derive_broadcast_keys,
    open_manifest,
    read_manifest_label,
)

HEAD_INDEX = 0
MOST_CONTENT_BYTES = CHUNK_BYTES * MOST_CHUNKS
SHARED = ("", "")
"""Task and cohort of a content that several tasks use: no task has such names."""


class ContentKind(Enum):
    """What a content is; the value travels."""

    ARTIFACT = "artifact"
    CATALOGUE = "catalogue"
    ATTACHMENT = "attachment"
    SHARED = "shared"
    """Values that several artifacts have in common: a safetensors file, by its SHA-256."""


@dataclass(frozen=True, slots=True)
class ContentHead(Record):
    """Which chunks make a content."""

    kind: ContentKind
    content_id: Annotated[Digest, Key("content")]
    length: Annotated[int, Within(1, MOST_CONTENT_BYTES)]
    """Plaintext bytes."""
    chunks: Chunks
    """SHA-256 of each chunk's message, in order; as many as ``length`` bytes can make."""

    MOST_BYTES = MAX_BODY_BYTES

    def check(self) -> None:
        require_chunks(len(self.chunks), self.length)


def seal_content(
    publication: Publication,
    signing: Ed25519PrivateKey,
    kind: ContentKind,
    content_id: bytes,
    content: bytes,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[bytes]:
    """The messages for topic indices 0, 1, ...: the head, then the chunks."""
    messages, digests = seal_chunks(publication, content, chunk_bytes)
    head = ContentHead(kind, content_id, len(content), digests)
    return [publication.seal_manifest(encode(head), signing), *messages]


def open_content_head(
    message: bytes,
    key: GroupKey,
    names: Sequence[tuple[str, str]],
    signing: Ed25519PublicKey,
) -> tuple[ContentHead, BroadcastKeys]:
    """A content's head, and the keys of its chunks. ``names``: tasks and cohorts that it may be
    sealed for, tried in this order.

    Raises ``WireError``: ``bad-tag`` where it is for none of them, or a parser's reason.
    """
    label = read_manifest_label(message)
    refused: WireError | None = None
    for task, cohort in names:
        keys = derive_broadcast_keys(key, label.broadcast_id, task, cohort)
        try:
            return decode(ContentHead, open_manifest(message, keys, signing)), keys
        except WireError as error:
            if error.reason != "bad-tag":
                raise
            refused = refused or error
    raise refused or WireError("bad-tag", "the head is sealed for nobody here")


# An artifact as one content: canonical CBOR {file name: bytes}, the manifest among the files.

MAX_BUNDLE_BYTES = 128 << 20


def pack_artifact(files: Mapping[str, bytes]) -> bytes:
    """The content of an artifact's files. Raises ValueError unless they are one artifact's."""
    if MANIFEST_FILE not in files:
        raise ValueError(f"the files lack {MANIFEST_FILE}")
    try:
        content = cbor.encode(dict(files))
        unpack_artifact(content, hashlib.sha256(files[MANIFEST_FILE]).digest())
    except WireError as error:
        raise ValueError(str(error)) from error
    return content


def unpack_artifact(content: bytes, artifact_id: bytes) -> dict[str, bytes]:
    """The files of the artifact ``artifact_id`` (32 bytes), each checked against its hash.

    Names are those the manifest lists, so none of them leaves a folder. Raises ``WireError``:
    ``wrong-content``, or a parser's reason.
    """
    value = cbor.decode(content, limit_bytes=MAX_BUNDLE_BYTES)
    if not isinstance(value, dict):
        raise WireError("wrong-fields", "expected a map of files")
    files = {name: data for name, data in value.items() if isinstance(data, bytes)}
    listed = files.get(MANIFEST_FILE)
    if listed is None or len(files) != len(value):
        raise WireError("wrong-fields", f"expected byte strings, {MANIFEST_FILE} among them")
    if hashlib.sha256(listed).digest() != artifact_id:
        raise WireError("wrong-content", "another artifact than the manifest names")
    try:
        manifest = Manifest.parse(listed)
    except ArtifactError as error:
        raise WireError("wrong-content", f"the artifact's manifest is broken: {error}") from error
    if set(files) != {MANIFEST_FILE, *manifest.files}:
        raise WireError("wrong-content", "the artifact's files are not those it lists")
    for name, entry in manifest.files.items():
        if len(files[name]) != entry.size:
            raise WireError("wrong-content", "a file's length is not the listed one")
        if hashlib.sha256(files[name]).hexdigest() != entry.sha256:
            raise WireError("wrong-content", "a file's hash is not the listed one")
    return files
