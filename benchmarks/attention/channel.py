"""A channel with the wire's float16, which counts what passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from device_sdk.wire.arrays.tensors import Codec, decode_tensors, encode_tensors

Tensors = Mapping[str, NDArray[Any]]


class HalfChannel:
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


def _through(tensors: Tensors) -> tuple[Tensors, int]:
    body = encode_tensors(tensors, Codec.FLOAT16, np.random.default_rng(0))
    return decode_tensors(body), len(body)
