"""Contents: artifacts, catalogues, attachments; sealed like broadcasts, found by their content id.

A content is published as a *head* and chunks, all retained, on the chunk topics of its content id:
the head at index 0, chunk i at index i + 1. The head is a message of the manifest's type whose
signed body is canonical CBOR {chunks, content, kind, length}; the chunks are a publication's, under
the broadcast id and the key epoch that stand outside the head.

A content is sealed for the devices of one task and cohort, or, where several tasks use it, for
:data:`SHARED`: by its id it can stand at the broker only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Record
from device_sdk.wire.publish.manifest import (
    CHUNK_BYTES,
    MAX_BODY_BYTES,
    MOST_CHUNKS,
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

CONTENT_ID_BYTES = 32
HEAD_INDEX = 0
SHARED = ("", "")
"""Task and cohort of a content that several tasks use: no task has such names."""
_FIELDS = ("chunks", "content", "kind", "length")


class ContentKind(Enum):
    """What a content is; the value travels."""

    ARTIFACT = "artifact"
    CATALOGUE = "catalogue"
    ATTACHMENT = "attachment"


@dataclass(frozen=True, slots=True)
class ContentHead:
    """Which chunks make a content. ``chunks``: SHA-256 of each chunk's message, in order.

    Raises ValueError for an id that is not 32 bytes, or another number of chunks than ``length``
    plaintext bytes make.
    """

    kind: ContentKind
    content_id: bytes
    length: int
    chunks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.content_id) != CONTENT_ID_BYTES:
            raise ValueError(f"a content id has {CONTENT_ID_BYTES} bytes")
        if not 0 < self.length <= CHUNK_BYTES * MOST_CHUNKS:
            raise ValueError(f"a content has 1 to {CHUNK_BYTES * MOST_CHUNKS} bytes")
        require_chunks(len(self.chunks), self.length)
        if any(len(digest) != 32 for digest in self.chunks):
            raise ValueError("each chunk's SHA-256 must be 32 bytes")

    def to_body(self) -> bytes:
        """Canonical CBOR, to be signed and sealed."""
        return cbor.encode(
            {
                "chunks": list(self.chunks),
                "content": self.content_id,
                "kind": self.kind.value,
                "length": self.length,
            }
        )


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
    return [publication.seal_manifest(head.to_body(), signing), *messages]


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
            return read_content_head(open_manifest(message, keys, signing)), keys
        except WireError as error:
            if error.reason != "bad-tag":
                raise
            refused = refused or error
    raise refused or WireError("bad-tag", "the head is sealed for nobody here")


def read_content_head(body: bytes) -> ContentHead:
    """Parse a head's body; verify its signature first. Raises ``WireError``."""
    record = Record(cbor.decode(body, limit_bytes=MAX_BODY_BYTES), _FIELDS)
    chunks = record.array("chunks", MOST_CHUNKS)
    digests = tuple(digest for digest in chunks if isinstance(digest, bytes))
    if len(digests) != len(chunks):
        raise WireError("bad-field", "each chunk's SHA-256 must be a byte string")
    try:
        return ContentHead(
            ContentKind(record.text("kind", 16)),
            record.octets("content", CONTENT_ID_BYTES),
            record.unsigned("length", CHUNK_BYTES * MOST_CHUNKS),
            digests,
        )
    except ValueError as error:
        raise WireError("bad-field", str(error)) from error
