"""A channel with the wire's encodings and seals, which counts the bytes of either direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.scatter.sealed_line import SealedLine
from device_sdk.wire.arrays.body import decode_update, encode_update
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from device_sdk.wire.arrays.tensors import Codec, decode_tensors, encode_tensors
from device_sdk.wire.codec import cbor
from device_sdk.wire.seal.broadcast import MAX_CHUNK_PAYLOAD_BYTES, Publication
from device_sdk.wire.seal.group_key import new_group_key

# Around a broadcast: what its manifest says besides the chunks' hashes, its signature, its seal.
_MANIFEST_BYTES = 400
_HASH_BYTES = 34


class MeasuredChannel:
    """Encodes, seals and decodes what passes.

    Updates travel under ``codec``, as float32 arrays; knowledge is in its own precision already.
    Broadcasts of models travel as float16, sums of knowledge as they are. ``rng`` draws keys and
    rounds int8.
    """

    def __init__(self, codec: Codec, rng: np.random.Generator, *, exact_broadcasts: bool) -> None:
        self._codec = codec
        self._down_codec = Codec.FLOAT32 if exact_broadcasts else Codec.FLOAT16
        self._rng = rng
        self._line = SealedLine(rng.spawn(1)[0])
        self._updates = self._broadcasts = 0
        self._up_bytes = self._down_bytes = 0

    def down(self, broadcast: Broadcast) -> Broadcast:
        """What every device of the round receives."""
        body = encode_tensors(broadcast.tensors, self._down_codec)
        self._broadcasts += 1
        self._down_bytes += self._published(body, broadcast.settings)
        return replace(broadcast, tensors=decode_tensors(body))

    def fetch(self, device: int, attachment: Attachment) -> Attachment:
        """Neither method attaches anything."""
        return attachment

    def up(self, update: Update) -> Update:
        """What the aggregator decodes."""
        body = encode_update(update, self._codec, self._rng)
        arrived, size = self._line.carry(body, update.round_id)
        self._updates += 1
        self._up_bytes += size
        return decode_update(arrived.body, arrived.identity.round)

    @property
    def up_bytes(self) -> float:
        """Mean size of an update's MQTT payloads, padding and seal included."""
        return self._up_bytes / max(1, self._updates)

    @property
    def down_bytes(self) -> float:
        """Mean size of a broadcast's MQTT payloads: manifest and chunks."""
        return self._down_bytes / max(1, self._broadcasts)

    def _published(self, arrays: bytes, settings: Mapping[str, Any]) -> int:
        plaintext = cbor.encode(dict(settings)) + arrays
        publication = Publication(
            new_group_key(1, self._rng.bytes), "clicks", "all", self._rng.bytes
        )
        size = _MANIFEST_BYTES
        for start in range(0, len(plaintext), MAX_CHUNK_PAYLOAD_BYTES):
            chunk = publication.seal_chunk(plaintext[start : start + MAX_CHUNK_PAYLOAD_BYTES])
            size += len(chunk) + _HASH_BYTES
        return size
