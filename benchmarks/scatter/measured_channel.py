"""A channel with the wire's encodings, which measures what an update takes once sealed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.scatter.experiment import UpdateCodec
from device_sdk.wire.envelope import HEADER_BYTES, MAX_MESSAGE_BYTES, TAG_BYTES
from device_sdk.wire.exchange import Broadcast, Update
from device_sdk.wire.padding import padded_length
from device_sdk.wire.sparse import SparseRows, ValueFormat, decode_sparse, encode_sparse

__all__ = ["MeasuredChannel"]

_FORMATS: dict[str, ValueFormat] = {
    "fp32": ValueFormat.FLOAT32,
    "fp16": ValueFormat.FLOAT16,
    "int8": ValueFormat.INT8,
}
# Around the body: task, generation, round and lengths.
_FRAME_BYTES = 64


class MeasuredChannel:
    """Encodes and decodes what passes; ``direct`` hands it over and measures rows only.

    Broadcasts travel as float16 whenever updates are encoded, as on the wire. ``rng`` rounds int8.
    """

    def __init__(self, codec: UpdateCodec, rng: np.random.Generator) -> None:
        self._codec = codec
        self._rng = rng
        self._shape = (0, 0)
        self._updates = 0
        self._rows = 0
        self._bytes = 0

    def down(self, broadcast: Broadcast) -> Broadcast:
        """The broadcast, its items rounded to float16."""
        items = broadcast.tensors["items"]
        self._shape = (items.shape[0], items.shape[1])
        if self._codec == "direct":
            return broadcast
        return replace(broadcast, tensors={"items": items.astype(np.float16)})

    def up(self, update: Update) -> Update:
        """What the aggregator decodes."""
        tensors = update.tensors
        self._updates += 1
        self._rows += len(tensors["rows"])
        if self._codec == "direct":
            return update
        items, width = self._shape
        sparse = SparseRows(tensors["columns"], tensors["rows"], tensors["values"], width)
        body = encode_sparse(sparse, _FORMATS[self._codec], self._rng)
        self._bytes += _sealed_bytes(len(body) + _FRAME_BYTES)
        found = decode_sparse(body, items=items, width=width)
        return Update(
            update.round_id,
            {"columns": found.columns, "rows": found.rows, "values": found.values},
            update.metadata,
        )

    @property
    def mean_rows(self) -> float:
        """Mean number of item rows in an update."""
        return self._rows / max(1, self._updates)

    @property
    def mean_bytes(self) -> float:
        """Mean size of an update on the broker, padding and seal included; 0 for ``direct``."""
        return self._bytes / max(1, self._updates)


def _sealed_bytes(payload: int) -> int:
    """Bytes of the envelopes that carry a payload, in fragments where one is not enough."""
    around = HEADER_BYTES + TAG_BYTES
    most = MAX_MESSAGE_BYTES - around - 64
    whole, rest = divmod(payload, most)
    return whole * MAX_MESSAGE_BYTES + (around + padded_length(rest, most + 1) if rest else 0)
