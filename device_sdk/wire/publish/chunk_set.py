"""A plaintext cut into a publication's chunks, and collected again in any order of arrival."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.broadcast import (
    BroadcastKeys,
    Publication,
    open_chunk,
    read_chunk_index,
)
from device_sdk.wire.publish.manifest import CHUNK_BYTES, chunk_count

__all__ = ["ChunkSet", "seal_chunks"]


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
