"""A channel with the wire's encodings, which counts what devices send and receive once sealed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from device_sdk.methods.mutual.contract import samples_mark
from device_sdk.wire.arrays.body import decode_update, encode_update
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from device_sdk.wire.arrays.tensors import Codec, decode_tensors, encode_tensors
from device_sdk.wire.publish.task_messages import TaskTerms, write_broadcast
from device_sdk.wire.seal.envelope import HEADER_BYTES, MAX_MESSAGE_BYTES, TAG_BYTES, padded_length

_CODECS = {"float32": Codec.FLOAT32, "float16": Codec.FLOAT16, "int8": Codec.INT8}
# Around an update's body: task, generation, round and lengths.
_FRAME_BYTES = 64


class MeasuredChannel:
    """Encodes and decodes what passes, floats down as float16, up in ``codec``.

    ``rng`` rounds int8. Bytes are totals over all devices.
    """

    def __init__(self, codec: str, rng: np.random.Generator) -> None:
        self._codec = _CODECS[codec]
        self._rng = rng
        self._held: set[tuple[int, str]] = set()
        self._broadcast_bytes = 0
        self.up_bytes = 0
        self.down_bytes = 0

    def down(self, broadcast: Broadcast) -> Broadcast:
        """The broadcast as decoded; it is counted for each device that answers."""
        terms = TaskTerms("method", "float16", 60.0)
        plain = write_broadcast(broadcast, terms, "float16")
        self._broadcast_bytes = sealed_bytes(len(plain))
        arrays = decode_tensors(encode_tensors(broadcast.tensors, Codec.FLOAT16))
        return replace(broadcast, tensors=arrays)

    def fetch(self, device: int, attachment: Attachment) -> Attachment:
        """The attachment as decoded; a device fetches the same samples once."""
        coded = encode_tensors(attachment.tensors, Codec.FLOAT16)
        place = (device, samples_mark(attachment.tensors))
        if place not in self._held:
            self._held.add(place)
            self.down_bytes += sealed_bytes(len(coded))
        return replace(attachment, tensors=decode_tensors(coded))

    def up(self, update: Update) -> Update:
        """What the aggregator decodes."""
        body = encode_update(update, self._codec, self._rng)
        self.up_bytes += sealed_bytes(len(body) + _FRAME_BYTES)
        self.down_bytes += self._broadcast_bytes
        return decode_update(body, update.round_id)


def sealed_bytes(payload: int) -> int:
    """Bytes of the envelopes that carry a payload, in fragments where one is not enough."""
    around = HEADER_BYTES + TAG_BYTES
    most = MAX_MESSAGE_BYTES - around - 64
    whole, rest = divmod(payload, most)
    return whole * MAX_MESSAGE_BYTES + (around + padded_length(rest, most + 1) if rest else 0)
