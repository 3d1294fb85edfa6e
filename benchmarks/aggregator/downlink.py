"""What a device fetches in a round: ML-1M's items at K = 64, in each of the encodings."""

from __future__ import annotations

import numpy as np

from aggregator.methods.scatter.method import initial_items
from benchmarks.aggregator.fleet import ITEMS, WIDTH
from device_sdk.wire.arrays.tensors import Codec, encode_tensors


def measure_downlink() -> dict[str, int]:
    """Bytes of the item matrix by encoding: ``float16``, ``int8`` and ``int4``."""
    rng = np.random.default_rng(6)
    items = initial_items(ITEMS, WIDTH, 0.1, rng)
    return {
        codec.name.lower(): len(encode_tensors({"items": items}, codec, rng))
        for codec in (Codec.FLOAT16, Codec.INT8, Codec.INT4)
    }
