"""What lies between a virtual device and the aggregator, and what it counts.

Each suite's channel carries what its method sends as the wire does, as far as that suite measures
it: :class:`HalfChannel` counts encoded arrays, the others whole sealed messages, as the product's
simulator does (:mod:`aggregator.simulate.traffic`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.simulate.traffic import sealed_bytes, sealed_content_bytes
from benchmarks.simulation import DirectChannel, Simulation
from device_sdk.methods.mutual.contract import samples_mark
from device_sdk.methods.scatter.contract import decode_scatter_update, encode_scatter_update
from device_sdk.wire.arrays.exchange import (
    Attachment,
    Broadcast,
    Update,
    decode_update,
    encode_update,
)
from device_sdk.wire.arrays.tensors import Codec, decode_tensors, encode_tensors
from device_sdk.wire.codec import cbor
from device_sdk.wire.publish.manifest import chunk_count
from device_sdk.wire.publish.receipts import (
    UpdateIdentity,
    write_update,
)
from device_sdk.wire.publish.task_messages import BROADCAST_CODECS, TaskTerms, write_broadcast

BroadcastCodec = Literal["float16", "int8", "int4"]
UpdateCodec = Literal["direct", "fp32", "fp16", "int8"]
Tensors = Mapping[str, NDArray[Any]]

WIRE_CODECS = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
"""The wire's names of scatter's update codecs."""

_DEVICE_ID = bytes(16)
_TASK = "movies"
# Around a broadcast: what its manifest says besides the chunks' hashes, its signature, its seal.
_MANIFEST_BYTES = 400
_HASH_BYTES = 34
# Around an update's body: task, generation, round and lengths.
_FRAME_BYTES = 64


def require_sound(simulation: Simulation) -> None:
    """Raises RuntimeError where a device failed or an update was refused: figures would be of
    another fleet."""
    if simulation.failures:
        raise RuntimeError(f"devices failed or were refused: {simulation.failures}")


class HalfChannel(DirectChannel):
    """float32 arrays travel as float16, others as they are; ``devices`` receive each broadcast."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self.down_bytes = 0
        self.up_bytes = 0

    def down(self, broadcast: Broadcast) -> Broadcast:
        """What every device decodes."""
        tensors, size = _through(broadcast.tensors)
        self.down_bytes += size * self._devices
        return replace(broadcast, tensors=tensors)

    def fetch(self, device: int, attachment: Attachment) -> Attachment:
        """What the device decodes."""
        tensors, size = _through(attachment.tensors)
        self.down_bytes += size
        return replace(attachment, tensors=tensors)

    def up(self, update: Update) -> Update:
        """What the aggregator decodes."""
        tensors, size = _through(update.tensors)
        self.up_bytes += size
        return replace(update, tensors=tensors)


class ScatterChannel(DirectChannel):
    """Encodes what passes, and counts it as it is sealed; ``direct`` hands it over and measures
    rows only.

    Broadcasts travel in ``broadcast_codec`` whenever updates are encoded, as on the wire. ``rng``
    rounds int8 updates; a child of it rounds broadcasts.
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
        _, self._broadcast_rng = rng.spawn(2)
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
            return self._with_items(broadcast, items.astype(np.float16))
        return self._with_items(broadcast, self._coded(items, self._broadcast_rng))

    def _with_items(self, broadcast: Broadcast, items: NDArray[Any]) -> Broadcast:
        return replace(broadcast, tensors={**broadcast.tensors, "items": items})

    def up(self, update: Update) -> Update:
        """What the aggregator decodes."""
        tensors = update.tensors
        self._updates += 1
        self._rows += len(tensors["rows"])
        if self._codec == "direct":
            return update
        items, width = self._shape
        body = encode_scatter_update(update, width, WIRE_CODECS[self._codec], self._rng)
        self._bytes += _sealed(body, update.round_id)
        return decode_scatter_update(body, update.round_id, items, width)

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


class DistillChannel(DirectChannel):
    """Encodes and decodes what passes, and counts it as it is sealed.

    Updates travel under ``codec``, as float32 arrays; knowledge is in its own precision already.
    Broadcasts of models travel as float16, sums of knowledge as they are. ``rng`` rounds
    int8.
    """

    def __init__(self, codec: Codec, rng: np.random.Generator, *, exact_broadcasts: bool) -> None:
        self._codec = codec
        self._down_codec = Codec.FLOAT32 if exact_broadcasts else Codec.FLOAT16
        self._rng = rng
        self._updates = self._broadcasts = 0
        self._up_bytes = self._down_bytes = 0

    def down(self, broadcast: Broadcast) -> Broadcast:
        """What every device of the round receives."""
        body = encode_tensors(broadcast.tensors, self._down_codec)
        self._broadcasts += 1
        content = len(cbor.encode(dict(broadcast.settings))) + len(body)
        manifest = _MANIFEST_BYTES + _HASH_BYTES * chunk_count(content)
        self._down_bytes += sealed_content_bytes(content) + manifest
        return replace(broadcast, tensors=decode_tensors(body))

    def up(self, update: Update) -> Update:
        """What the aggregator decodes."""
        body = encode_update(update, self._codec, self._rng)
        self._updates += 1
        self._up_bytes += _sealed(body, update.round_id)
        return decode_update(body, update.round_id)

    @property
    def up_bytes(self) -> float:
        """Mean size of an update's MQTT payloads, padding and seal included."""
        return self._up_bytes / max(1, self._updates)

    @property
    def down_bytes(self) -> float:
        """Mean size of a broadcast's MQTT payloads: manifest and chunks."""
        return self._down_bytes / max(1, self._broadcasts)


class MutualChannel(DirectChannel):
    """Encodes and decodes what passes, floats down as float16, up in ``codec``.

    ``rng`` rounds int8. Bytes are totals over all devices.
    """

    def __init__(self, codec: str, rng: np.random.Generator) -> None:
        self._codec = Codec[codec.upper()]
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
        return replace(broadcast, tensors=_through(broadcast.tensors)[0])

    def fetch(self, device: int, attachment: Attachment) -> Attachment:
        """The attachment as decoded; a device fetches the same samples once."""
        arrays, size = _through(attachment.tensors)
        place = (device, samples_mark(attachment.tensors))
        if place not in self._held:
            self._held.add(place)
            self.down_bytes += sealed_bytes(size)
        return replace(attachment, tensors=arrays)

    def up(self, update: Update) -> Update:
        """What the aggregator decodes."""
        body = encode_update(update, self._codec, self._rng)
        self.up_bytes += sealed_bytes(len(body) + _FRAME_BYTES)
        self.down_bytes += self._broadcast_bytes
        return decode_update(body, update.round_id)


def _sealed(body: bytes, round_id: int) -> int:
    """Bytes of the MQTT payloads, without their topics, that carry an update's body."""
    return sealed_bytes(len(write_update(UpdateIdentity(_DEVICE_ID, _TASK, 1, round_id), body)))


def _through(tensors: Tensors) -> tuple[Tensors, int]:
    body = encode_tensors(tensors, Codec.FLOAT16, np.random.default_rng(0))
    return decode_tensors(body), len(body)
