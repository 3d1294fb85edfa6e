"""Contents: artifacts, catalogues, attachments; sealed like broadcasts, found by their content id.

A content is published as a *head* and chunks, all retained, on the chunk topics of its content id:
the head at index 0, chunk i at index i + 1. The head is a message of the manifest's type whose
signed body is canonical CBOR {chunks, content, kind, length}; the chunks are a publication's, under
the broadcast id and the key epoch that stand outside the head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.record import Record
from device_sdk.wire.publish.manifest import CHUNK_BYTES, MAX_BODY_BYTES, MOST_CHUNKS, chunk_count
from device_sdk.wire.seal.broadcast import (
    BroadcastKeys,
    Publication,
    open_chunk,
    read_chunk_index,
)

# A plaintext cut into a publication's chunks, and collected again in any order of arrival.


def seal_chunks(
    publication: Publication, plaintext: bytes
) -> tuple[list[bytes], tuple[bytes, ...]]:
    """The chunk messages of ``plaintext``, in order, and the SHA-256 of each."""
    messages = [
        publication.seal_chunk(plaintext[at : at + CHUNK_BYTES])
        for at in range(0, len(plaintext), CHUNK_BYTES)
    ]
    return messages, tuple(hashlib.sha256(message).digest() for message in messages)


class ChunkSet:
    """Collects the chunks that a verified manifest (or content head) names.

    Memory is that of the chunks received. ``digests`` and ``length`` are the manifest's. Raises
    ValueError when their numbers disagree.
    """

    def __init__(
        self, keys: BroadcastKeys, broadcast_id: bytes, digests: Sequence[bytes], length: int
    ) -> None:
        if len(digests) != chunk_count(length):
            raise ValueError(f"{len(digests)} chunks for {length} bytes")
        self._keys = keys
        self._broadcast_id = broadcast_id
        self._digests = tuple(digests)
        self._length = length
        self._parts: dict[int, bytes] = {}

    @property
    def missing(self) -> int:
        """How many chunks have not come yet."""
        return len(self._digests) - len(self._parts)

    def add(self, message: bytes) -> bool:
        """Take a chunk's message; whether all are there now. One that came before is ignored.

        Raises ``WireError``: ``wrong-chunk``, ``bad-tag``, or a parser's reason.
        """
        index = read_chunk_index(message)
        if index >= len(self._digests):
            raise WireError("wrong-chunk", "a chunk beyond the last one that the manifest names")
        if index not in self._parts:
            self._parts[index] = open_chunk(
                message, self._keys, self._broadcast_id, index, self._digests[index]
            )
        return not self.missing

    def plaintext(self) -> bytes:
        """The whole. Raises ValueError while chunks are missing, ``WireError("wrong-length")``."""
        if self.missing:
            raise ValueError(f"{self.missing} chunks are missing")
        whole = b"".join(self._parts[index] for index in range(len(self._digests)))
        if len(whole) != self._length:
            raise WireError("wrong-length", "the chunks do not make the length announced")
        return whole


CONTENT_ID_BYTES = 32
HEAD_INDEX = 0
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
        if len(self.chunks) != chunk_count(self.length):
            raise ValueError(f"{len(self.chunks)} chunks for {self.length} bytes")
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
) -> list[bytes]:
    """The messages for topic indices 0, 1, ...: the head, then the chunks."""
    messages, digests = seal_chunks(publication, content)
    head = ContentHead(kind, content_id, len(content), digests)
    return [publication.seal_manifest(head.to_body(), signing), *messages]


def read_content_head(body: bytes) -> ContentHead:
    """Parse a head's body; verify its signature first. Raises ``WireError``."""
    record = Record.decode(body, _FIELDS, limit_bytes=MAX_BODY_BYTES)
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
