"""A channel with the wire's encodings, which measures what an update takes once sealed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.scatter.experiment import BroadcastCodec, UpdateCodec
from benchmarks.scatter.sealed_line import SealedLine
from device_sdk.methods.scatter.contract import decode_scatter_update, encode_scatter_update
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from device_sdk.wire.arrays.tensors import decode_tensors, encode_tensors
from device_sdk.wire.publish.task_messages import BROADCAST_CODECS

WIRE_CODECS = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
"""The wire's names of update codecs."""


class MeasuredChannel:
    """Encodes and seals what passes; ``direct`` hands it over and measures rows only.

    Broadcasts travel in ``broadcast_codec`` whenever updates are encoded, as on the wire. ``rng``
    rounds int8 updates; children of it draw the keys, and round broadcasts.
    """

    def __init__(
        self,
        codec: UpdateCodec,
        rng: np.random.Generator,
        broadcast_codec: BroadcastCodec = "float16",
    ) -> None:
        self._codec = codec
        self._broadcast_codec = broadcast_codec
        self._rng = rng
        keys, self._broadcast_rng, self._shown_rng = rng.spawn(3)
        self._line = SealedLine(keys)
        self._shape = (0, 0)
        self._updates = 0
        self._rows = 0
        self._bytes = 0

    def down(self, broadcast: Broadcast) -> Broadcast:
        """The broadcast, its items as they arrive."""
        items = broadcast.tensors["items"]
        self._shape = (items.shape[0], items.shape[1])
        if self._codec == "direct":
            return broadcast
        if self._broadcast_codec == "float16":
            return replace(broadcast, tensors={"items": items.astype(np.float16)})
        return replace(broadcast, tensors={"items": self._coded(items, self._broadcast_rng)})

    def recommended_with(self, items: NDArray[np.float32]) -> NDArray[np.float32]:
        """The matrix [items, K] that devices recommend with: as it arrives.

        As it is where it arrives in float16: that rounding is far below what training leaves open.
        """
        if self._codec == "direct" or self._broadcast_codec == "float16":
            return items
        return self._coded(items, self._shown_rng)

    def fetch(self, device: int, attachment: Attachment) -> Attachment:
        """Scatter attaches nothing."""
        return attachment

    def up(self, update: Update) -> Update:
        """What the aggregator decodes."""
        tensors = update.tensors
        self._updates += 1
        self._rows += len(tensors["rows"])
        if self._codec == "direct":
            return update
        items, width = self._shape
        body = encode_scatter_update(update, width, WIRE_CODECS[self._codec], self._rng)
        arrived, size = self._line.carry(body, update.round_id)
        self._bytes += size
        return decode_scatter_update(arrived.body, arrived.identity.round, items, width)

    def _coded(self, items: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
        codec = BROADCAST_CODECS[self._broadcast_codec]
        return decode_tensors(encode_tensors({"items": items}, codec, rng))["items"]

    @property
    def mean_rows(self) -> float:
        """Mean number of item rows in an update."""
        return self._rows / max(1, self._updates)

    @property
    def mean_bytes(self) -> float:
        """Mean size of an update's MQTT payloads, padding and seal included; 0 for ``direct``."""
        return self._bytes / max(1, self._updates)
