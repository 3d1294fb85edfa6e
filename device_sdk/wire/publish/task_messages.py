"""What a round's broadcast says inside its chunks: the task's terms, settings, and named arrays.

Bytes: ``length of the head 4 | head | arrays``, little-endian. The head is canonical CBOR: the
fields of :class:`~device_sdk.wire.publish.terms.TaskTerms` and ``settings``; the arrays are named
arrays (``tensors.py``) in the codec that the manifest names. Attachments are contents of their own,
each of named arrays in the same codec.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.arrays.body import UPDATE_LIMITS, read_scalars
from device_sdk.wire.arrays.exchange import Attachment, Broadcast
from device_sdk.wire.arrays.tensors import Codec, decode_tensors, encode_tensors
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.record import Record
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.terms import (
    FIELDS,
    UPDATE_CODECS,
    OfferedArtifact,
    OfferedAttachment,
    TaskTerms,
)

__all__ = [
    "BROADCAST_CODECS",
    "UPDATE_CODECS",
    "OfferedArtifact",
    "OfferedAttachment",
    "TaskTerms",
    "read_attachment",
    "read_broadcast",
    "write_attachment",
    "write_broadcast",
]

BROADCAST_CODECS: Mapping[str, Codec] = {
    "float16": Codec.FLOAT16,
    "float32": Codec.FLOAT32,
    "int8": Codec.INT8,
    "int4": Codec.INT4,
}
"""How float32 arrays travel, by the manifest's ``codec`` and, in an update of named arrays
(``arrays/body.py``), by the terms' ``update_codec``."""
MAX_HEAD_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")


def write_broadcast(
    broadcast: Broadcast, terms: TaskTerms, codec: str, rng: np.random.Generator | None = None
) -> bytes:
    """The plaintext of a broadcast; round and version travel in the manifest.

    ``codec``: a key of ``BROADCAST_CODECS``; ``rng`` is needed for ``int8`` and ``int4``. Raises
    ValueError for arrays that the codec cannot carry, and terms above 4 MiB.
    """
    head = cbor.encode({**terms.to_fields(), "settings": dict(broadcast.settings)})
    if len(head) > MAX_HEAD_BYTES:
        raise ValueError(f"terms and settings take {len(head)} bytes; {MAX_HEAD_BYTES} fit")
    arrays = encode_tensors(broadcast.tensors, BROADCAST_CODECS[codec], rng)
    return _LENGTH.pack(len(head)) + head + arrays


def read_broadcast(plaintext: bytes, manifest: RoundManifest) -> tuple[TaskTerms, Broadcast]:
    """Parse a broadcast whose chunks the verified ``manifest`` named. Raises ``WireError``."""
    if manifest.codec not in BROADCAST_CODECS:
        raise WireError("bad-codec", "the broadcast is in a codec that is unknown here")
    if len(plaintext) < _LENGTH.size:
        raise WireError("truncated", "no room for the length of the terms")
    (length,) = _LENGTH.unpack_from(plaintext)
    end = _LENGTH.size + length
    if len(plaintext) < end:
        raise WireError("truncated", "the broadcast ends within its terms")
    record = Record.decode(
        plaintext[_LENGTH.size : end], (*FIELDS, "settings"), limit_bytes=MAX_HEAD_BYTES
    )
    terms = TaskTerms.from_record(record)
    tensors = decode_tensors(plaintext[end:], limits=UPDATE_LIMITS)
    settings = read_scalars(record.take("settings"), "settings")
    try:
        broadcast = Broadcast(manifest.round, manifest.version, tensors, settings)
    except (TypeError, ValueError) as error:
        raise WireError("bad-field", "the broadcast's settings are not usable") from error
    return terms, broadcast


def write_attachment(
    tensors: Mapping[str, NDArray[Any]], codec: str, rng: np.random.Generator | None = None
) -> bytes:
    """The content of an attachment. Raises ValueError as :func:`write_broadcast` does."""
    return encode_tensors(tensors, BROADCAST_CODECS[codec], rng)


def read_attachment(content: bytes, cohort: str) -> Attachment:
    """The attachment in a content that came under its head. Raises ``WireError``."""
    return Attachment(decode_tensors(content, limits=UPDATE_LIMITS), cohort)
