"""An update of any method as bytes: scalar metadata, and named arrays.

``1 | length of the metadata 2 | metadata | arrays``, little-endian. The metadata is a canonical
CBOR map of scalars; the arrays are named arrays (``tensors.py``), to the last byte.
"""

from __future__ import annotations

import struct

import numpy as np

from device_sdk.wire.arrays.exchange import Scalar, Update
from device_sdk.wire.arrays.tensors import Codec, TensorLimits, decode_tensors, encode_tensors
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError

MAX_METADATA_BYTES = 16 * 1024
UPDATE_LIMITS = TensorLimits(most_arrays=4096, most_bytes=256 << 20)
"""What the aggregator takes from one device in one round."""
_FORMAT = 1
_HEAD = struct.Struct("<BH")


def encode_update(update: Update, codec: Codec, rng: np.random.Generator | None = None) -> bytes:
    """The body of ``update``; ``round_id`` and ``sender`` travel apart from it.

    ``codec`` says how float32 arrays travel; ``rng`` is needed for ``Codec.INT8`` only. Raises
    ValueError for arrays that the codec cannot carry and metadata above 16 KiB.
    """
    metadata = cbor.encode(dict(update.metadata))
    if len(metadata) > MAX_METADATA_BYTES:
        raise ValueError(f"the metadata take {len(metadata)} bytes; {MAX_METADATA_BYTES} fit")
    if len(update.tensors) > UPDATE_LIMITS.most_arrays:
        raise ValueError(f"{len(update.tensors)} arrays; {UPDATE_LIMITS.most_arrays} fit")
    arrays = encode_tensors(update.tensors, codec, rng)
    return _HEAD.pack(_FORMAT, len(metadata)) + metadata + arrays


def decode_update(body: bytes, round_id: int, sender: str = "") -> Update:
    """The update in ``body``, of the round and sender that its session and identity name.

    Pure and total. Raises ``WireError``: ``truncated``, ``bad-format``, ``bad-cbor``,
    ``bad-field``, or a reason of :func:`device_sdk.wire.arrays.tensors.decode_tensors`.
    """
    if len(body) < _HEAD.size:
        raise WireError("truncated", "no room for the head of an update")
    form, length = _HEAD.unpack_from(body)
    if form != _FORMAT:
        raise WireError("bad-format", f"format {form} of an update is unknown; expected {_FORMAT}")
    end = _HEAD.size + length
    if length > MAX_METADATA_BYTES or len(body) < end:
        raise WireError("truncated", "the update ends within its metadata")
    metadata = read_scalars(
        cbor.decode(body[_HEAD.size : end], limit_bytes=MAX_METADATA_BYTES), "metadata"
    )
    tensors = decode_tensors(body[end:], limits=UPDATE_LIMITS)
    try:
        return Update(round_id, tensors, metadata, sender)
    except (TypeError, ValueError) as error:
        raise WireError("bad-field", "the update's metadata or arrays are not usable") from error


def read_scalars(value: cbor.CborValue, what: str) -> dict[str, Scalar]:
    """A decoded map of scalars. Raises ``WireError("bad-field")``, naming ``what``."""
    if not isinstance(value, dict):
        raise WireError("bad-field", f"the {what} must be a map")
    scalars: dict[str, Scalar] = {}
    for name, scalar in value.items():
        if not isinstance(scalar, (bool, int, float, str)):
            raise WireError("bad-field", f"{what}: expected truth values, numbers and texts")
        scalars[name] = scalar
    return scalars
