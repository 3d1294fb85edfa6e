"""What a round's broadcast says inside its chunks: the task's terms, and named arrays.

Bytes: ``length of the terms 4 | terms | arrays``, little-endian. The terms are canonical CBOR
{method, settings, train_seconds, update_codec}; the arrays are named arrays (``tensors.py``) in the
codec that the manifest names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from device_sdk.wire import cbor
from device_sdk.wire.errors import WireError
from device_sdk.wire.exchange import Broadcast, Scalar
from device_sdk.wire.manifest import Manifest
from device_sdk.wire.names import MOST_NAME_BYTES, read_name, require_name
from device_sdk.wire.record import Record
from device_sdk.wire.sparse import ValueFormat
from device_sdk.wire.tensors import Codec, decode_tensors, encode_tensors

__all__ = [
    "BROADCAST_CODECS",
    "UPDATE_CODECS",
    "TaskTerms",
    "read_broadcast",
    "write_broadcast",
]

BROADCAST_CODECS: Mapping[str, Codec] = {
    "float16": Codec.FLOAT16,
    "float32": Codec.FLOAT32,
    "int8": Codec.INT8,
}
"""How the broadcast's float32 arrays travel, by the manifest's ``codec``."""
UPDATE_CODECS: Mapping[str, ValueFormat] = {
    "float16": ValueFormat.FLOAT16,
    "float32": ValueFormat.FLOAT32,
    "int8": ValueFormat.INT8,
}
"""How devices send their values, by the terms' ``update_codec``."""
MAX_TERMS_BYTES = 16 * 1024
_LENGTH = struct.Struct("<I")
_FIELDS = ("method", "settings", "train_seconds", "update_codec")


@dataclass(frozen=True, slots=True)
class TaskTerms:
    """What a device must know beside the arrays and settings of the broadcast.

    ``method`` names the pair of learner and method. ``update_codec`` is a key of ``UPDATE_CODECS``.
    ``train_seconds``: a device picks its k so that its local training fits into this time.
    Raises ValueError, naming the field.
    """

    method: str
    update_codec: str
    train_seconds: float

    def __post_init__(self) -> None:
        require_name("method", self.method)
        if self.update_codec not in UPDATE_CODECS:
            raise ValueError(
                f"update_codec is {self.update_codec!r}; expected one of {', '.join(UPDATE_CODECS)}"
            )
        if not math.isfinite(self.train_seconds) or self.train_seconds <= 0:
            raise ValueError(f"train_seconds is {self.train_seconds}; expected above 0")


def write_broadcast(
    broadcast: Broadcast, terms: TaskTerms, codec: str, rng: np.random.Generator | None = None
) -> bytes:
    """The plaintext of a broadcast; round and version travel in the manifest.

    ``codec``: a key of ``BROADCAST_CODECS``; ``rng`` is needed for ``int8`` only. Raises ValueError
    for arrays that the codec cannot carry.
    """
    head = cbor.encode(
        {
            "method": terms.method,
            "settings": dict(broadcast.settings),
            "train_seconds": float(terms.train_seconds),
            "update_codec": terms.update_codec,
        }
    )
    if len(head) > MAX_TERMS_BYTES:
        raise ValueError(f"the settings take {len(head)} bytes; at most {MAX_TERMS_BYTES} fit")
    arrays = encode_tensors(broadcast.tensors, BROADCAST_CODECS[codec], rng)
    return _LENGTH.pack(len(head)) + head + arrays


def read_broadcast(plaintext: bytes, manifest: Manifest) -> tuple[TaskTerms, Broadcast]:
    """Parse a broadcast whose chunks the verified ``manifest`` named. Raises ``WireError``."""
    if manifest.codec not in BROADCAST_CODECS:
        raise WireError("bad-codec", "the broadcast is in a codec that is unknown here")
    if len(plaintext) < _LENGTH.size:
        raise WireError("truncated", "no room for the length of the terms")
    (length,) = _LENGTH.unpack_from(plaintext)
    end = _LENGTH.size + length
    if len(plaintext) < end:
        raise WireError("truncated", "the broadcast ends within its terms")
    record = Record.decode(plaintext[_LENGTH.size : end], _FIELDS, limit_bytes=MAX_TERMS_BYTES)
    method = read_name("method", record.text("method", MOST_NAME_BYTES).encode())
    try:
        terms = TaskTerms(method, record.text("update_codec", 32), record.number("train_seconds"))
        broadcast = Broadcast(
            round_id=manifest.round,
            version=manifest.version,
            tensors=decode_tensors(plaintext[end:]),
            settings=_scalars(record.any("settings")),
        )
    except (TypeError, ValueError) as error:
        raise WireError("bad-field", "the broadcast's terms or arrays are not usable") from error
    return terms, broadcast


def _scalars(value: cbor.Value) -> dict[str, Scalar]:
    if not isinstance(value, dict):
        raise WireError("bad-field", "the settings must be a map")
    scalars: dict[str, Scalar] = {}
    for name, setting in value.items():
        if not isinstance(setting, (bool, int, float, str)):
            raise WireError("bad-field", "a setting must be a truth value, number or text")
        scalars[name] = setting
    return scalars
