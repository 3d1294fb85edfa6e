"""What a round's broadcast says inside its chunks: the task's terms, settings, and named arrays.

Bytes: ``length of the head 4 | head | arrays``, little-endian. The head is canonical CBOR: the
fields of :class:`TaskTerms` and ``settings``; the arrays are named arrays (``tensors.py``) in the
codec that the manifest names. Attachments are contents of their own, each of named arrays in the
same codec.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.evaluation.terms import EvaluationTerms
from device_sdk.wire.arrays.exchange import UPDATE_LIMITS, Attachment, Broadcast
from device_sdk.wire.arrays.sparse import ValueFormat
from device_sdk.wire.arrays.tensors import Codec, decode_tensors, encode_tensors
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MOST_NAME_BYTES, Record, read_name, require_name
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.seal.broadcast import WRAPPED_BYTES

UPDATE_CODECS: Mapping[str, ValueFormat] = {
    "float16": ValueFormat.FLOAT16,
    "float32": ValueFormat.FLOAT32,
    "int8": ValueFormat.INT8,
}
"""How devices send their values, by the terms' ``update_codec``; ValueFormat is scatter's."""
MOST_ARTIFACTS = 32
MOST_ATTACHMENTS = 16_384
MOST_MEMBERS = 65_536
_ID_BYTES = 32
_MOST_BYTES = 2**31 - 1
_MOST_LABEL_BYTES = 200
_ATTACHMENT = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")
FIELDS = ("artifacts", "attachments", "cohort_keys", "method", "train_seconds", "update_codec")
EVALUATION = "evaluation"
"""A field of terms that ask for an evaluation, and of no others."""


@dataclass(frozen=True, slots=True)
class OfferedArtifact:
    """An artifact that the task offers: its id, its name for people, and its content's bytes.

    ``companion``: another artifact that goes with it, such as attention's meta-network.
    """

    artifact_id: bytes
    name: str
    size: int
    companion: OfferedArtifact | None = None

    def __post_init__(self) -> None:
        _require_content(self.artifact_id, self.size)
        if self.companion is not None and self.companion.companion is not None:
            raise ValueError("a companion has no companion of its own")
        if not 1 <= len(self.name.encode()) <= _MOST_LABEL_BYTES:
            raise ValueError(f"an artifact's name has 1 to {_MOST_LABEL_BYTES} bytes")

    @property
    def total_size(self) -> int:
        """Bytes, the companion's included."""
        return self.size + (0 if self.companion is None else self.companion.size)


@dataclass(frozen=True, slots=True)
class OfferedAttachment:
    """An attachment of the round: what it is called, the content that holds it, and who may read.

    ``size``: the content's bytes. ``cohort``: "" for every device of the task.
    """

    name: str
    content_id: bytes
    size: int
    cohort: str = ""

    def __post_init__(self) -> None:
        _require_attachment_name(self.name)
        if self.cohort:
            _require_attachment_name(self.cohort)
        _require_content(self.content_id, self.size)


@dataclass(frozen=True, slots=True)
class TaskTerms:
    """What a device must know beside the arrays and settings of the broadcast.

    Attributes:
        method: names the pair of learner and method.
        update_codec: a key of ``UPDATE_CODECS``.
        train_seconds: a device picks its k, or its artifact, so that its local training fits into
            this time.
        artifacts: what the task offers, smallest first; the first one is the manifest's. Empty for
            a task that leaves the artifact to the device.
        attachments: by rising name.
        cohort_keys: by cohort, its key wrapped for each member (``seal/group_key.py``).
        evaluation: what devices find out about the model; None for nothing.

    Raises ValueError, naming the field.
    """

    method: str
    update_codec: str
    train_seconds: float
    artifacts: tuple[OfferedArtifact, ...] = ()
    attachments: tuple[OfferedAttachment, ...] = ()
    cohort_keys: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)
    evaluation: EvaluationTerms | None = None

    def __post_init__(self) -> None:
        require_name("method", self.method)
        if self.update_codec not in UPDATE_CODECS:
            raise ValueError(
                f"update_codec is {self.update_codec!r}; expected one of {', '.join(UPDATE_CODECS)}"
            )
        if not math.isfinite(self.train_seconds) or self.train_seconds <= 0:
            raise ValueError(f"train_seconds is {self.train_seconds}; expected above 0")
        if len(self.artifacts) > MOST_ARTIFACTS or len(self.attachments) > MOST_ATTACHMENTS:
            raise ValueError(
                f"{len(self.artifacts)} artifacts and {len(self.attachments)} attachments; at most "
                f"{MOST_ARTIFACTS} and {MOST_ATTACHMENTS} fit"
            )
        if len({each.artifact_id for each in self.artifacts}) != len(self.artifacts):
            raise ValueError("artifacts holds one of them twice")
        if any(low.name >= high.name for low, high in pairwise(self.attachments)):
            raise ValueError("attachments must come by rising name, each once")
        for cohort, wrapped in self.cohort_keys.items():
            _require_attachment_name(cohort)
            if len(wrapped) > MOST_MEMBERS or any(len(e) != WRAPPED_BYTES for e in wrapped):
                raise ValueError(f"cohort_keys: a member's entry has {WRAPPED_BYTES} bytes")
        for attachment in self.attachments:
            if attachment.cohort and attachment.cohort not in self.cohort_keys:
                raise ValueError(f"attachment {attachment.name!r} is for a cohort without a key")
        object.__setattr__(self, "cohort_keys", MappingProxyType(dict(self.cohort_keys)))

    def to_fields(self) -> dict[str, cbor.CborValue]:
        """The terms' part of a broadcast's head, as CBOR values."""
        asked = {} if self.evaluation is None else {EVALUATION: self.evaluation.to_fields()}
        return {
            **asked,
            "artifacts": [_artifact_fields(each) for each in self.artifacts],
            "attachments": [
                {
                    "bytes": each.size,
                    "cohort": each.cohort,
                    "content": each.content_id,
                    "name": each.name,
                }
                for each in self.attachments
            ],
            "cohort_keys": {name: list(wrapped) for name, wrapped in self.cohort_keys.items()},
            "method": self.method,
            "train_seconds": float(self.train_seconds),
            "update_codec": self.update_codec,
        }

    @classmethod
    def from_record(cls, record: Record) -> TaskTerms:
        """The inverse. Raises ``WireError``: ``bad-field``, ``wrong-fields``."""
        method = read_name("method", record.text("method", MOST_NAME_BYTES).encode())
        keys = record.mapping("cohort_keys")
        try:
            return cls(
                method,
                record.text("update_codec", 32),
                record.number("train_seconds"),
                tuple(_artifact(each) for each in record.array("artifacts", MOST_ARTIFACTS)),
                tuple(_attachment(each) for each in record.array("attachments", MOST_ATTACHMENTS)),
                {name: _wrapped(entries) for name, entries in keys.items()},
                EvaluationTerms.from_value(record.take(EVALUATION))
                if EVALUATION in record
                else None,
            )
        except ValueError as error:
            raise WireError("bad-field", f"the terms are not usable: {error}") from error


def _artifact_fields(artifact: OfferedArtifact) -> dict[str, cbor.CborValue]:
    companion = artifact.companion
    return {
        "bytes": artifact.size,
        "companion": None if companion is None else _artifact_fields(companion),
        "id": artifact.artifact_id,
        "name": artifact.name,
    }


def _artifact(value: cbor.CborValue, *, is_companion: bool = False) -> OfferedArtifact:
    record = Record(value, ("bytes", "companion", "id", "name"))
    alone = record.take("companion") is None
    if is_companion and not alone:
        raise WireError("bad-field", "a companion has no companion of its own")
    return OfferedArtifact(
        record.octets("id", _ID_BYTES),
        record.text("name", _MOST_LABEL_BYTES),
        record.unsigned("bytes", _MOST_BYTES),
        None if alone else _artifact(record.take("companion"), is_companion=True),
    )


def _attachment(value: cbor.CborValue) -> OfferedAttachment:
    record = Record(value, ("bytes", "cohort", "content", "name"))
    return OfferedAttachment(
        record.text("name", _MOST_LABEL_BYTES),
        record.octets("content", _ID_BYTES),
        record.unsigned("bytes", _MOST_BYTES),
        record.text("cohort", _MOST_LABEL_BYTES),
    )


def _wrapped(entries: cbor.CborValue) -> tuple[bytes, ...]:
    if not isinstance(entries, list) or len(entries) > MOST_MEMBERS:
        raise WireError("bad-field", "a cohort's keys must be an array")
    found = tuple(entry for entry in entries if isinstance(entry, bytes))
    if len(found) != len(entries):
        raise WireError("bad-field", "each wrapped key must be a byte string")
    return found


def _require_content(content_id: bytes, size: int) -> None:
    if len(content_id) != _ID_BYTES:
        raise ValueError(f"the id has {len(content_id)} bytes; expected {_ID_BYTES}")
    if isinstance(size, bool) or not 0 < size <= _MOST_BYTES:
        raise ValueError(f"size is {size!r}; expected 1 to {_MOST_BYTES} bytes")


def _require_attachment_name(name: str) -> None:
    if not _ATTACHMENT.fullmatch(name) or len(name) > _MOST_LABEL_BYTES:
        raise ValueError(f"{name[:80]!r} is no name of an attachment or cohort")


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
    ValueError for arrays that no codec carries, and terms above 4 MiB.
    """
    head = cbor.encode({**terms.to_fields(), "settings": dict(broadcast.settings)})
    if len(head) > MAX_HEAD_BYTES:
        raise ValueError(f"terms and settings take {len(head)} bytes; {MAX_HEAD_BYTES} fit")
    arrays = encode_tensors(broadcast.tensors, BROADCAST_CODECS[codec], rng, exact=broadcast.exact)
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
    record = Record(
        cbor.decode(plaintext[_LENGTH.size : end], limit_bytes=MAX_HEAD_BYTES),
        (*FIELDS, "settings"),
        optional=(EVALUATION,),
    )
    terms = TaskTerms.from_record(record)
    tensors = decode_tensors(plaintext[end:], limits=UPDATE_LIMITS)
    try:
        broadcast = Broadcast(manifest.round, manifest.version, tensors, record.mapping("settings"))
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
