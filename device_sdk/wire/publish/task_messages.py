"""What a round's broadcast says inside its chunks: the task's terms, settings, and named arrays.

Bytes: ``length of the head 4 | head | arrays``, little-endian. The head is a
:class:`BroadcastHead`; the arrays are named arrays (``tensors.py``) in the codec that the manifest
names. Attachments are contents of their own, each of named arrays in the same codec.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from device_sdk.evaluation.report import EvaluationTerms
from device_sdk.fields import Declared, Key, Length, OneOf, Rising, Such, Within, plain, require
from device_sdk.wire.arrays.exchange import (
    TENSOR_NAME_WORDS,
    UPDATE_LIMITS,
    Attachment,
    Broadcast,
    Scalars,
    is_tensor_name,
)
from device_sdk.wire.arrays.sparse import ValueFormat
from device_sdk.wire.arrays.tensors import Codec, decode_tensors, encode_tensors
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Name, Record, Served, decode_value
from device_sdk.wire.publish.manifest import Digest, RoundManifest
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
MAX_HEAD_BYTES = 4 << 20
Size = Annotated[int, Within(1, 2**31 - 1), Key("bytes")]
Label = Annotated[str, Length(1, 200)]
AttachmentName = Annotated[Label, Such(is_tensor_name, TENSOR_NAME_WORDS)]


@dataclass(frozen=True, slots=True)
class OfferedContent(Declared):
    """An artifact that goes with another, such as attention's meta-network."""

    artifact_id: Annotated[Digest, Key("id")]
    name: Label
    """For people."""
    size: Size
    """Bytes of its content."""


@dataclass(frozen=True, slots=True)
class OfferedShare(Declared):
    """Values that several artifacts of the task have in common: a ladder's frozen backbone."""

    content_id: Annotated[Digest, Key("content")]
    size: Size
    """Bytes of its content."""


@dataclass(frozen=True, slots=True)
class OfferedArtifact(OfferedContent):
    """An artifact that the task offers."""

    companion: OfferedContent | None = None
    """Another one that goes with it."""
    shared: OfferedShare | None = None
    """What it needs beside itself, and is fetched once."""

    def check(self) -> None:
        if isinstance(self.companion, OfferedArtifact) and self.companion.companion is not None:
            raise ValueError("a companion has no companion of its own")

    @property
    def total_size(self) -> int:
        """Bytes, with the companion's and those that it shares."""
        beside = (self.companion, self.shared)
        return self.size + sum(each.size for each in beside if each is not None)


@dataclass(frozen=True, slots=True)
class OfferedAttachment(Declared):
    """An attachment of the round: its name, the content that holds it, and who may read."""

    name: AttachmentName
    content_id: Annotated[Digest, Key("content")]
    size: Size
    """Bytes of its content."""
    cohort: AttachmentName = ""
    """Empty for every device of the task."""


@dataclass(frozen=True, slots=True)
class TaskTerms(Declared):
    """What a device must know beside the arrays and settings of the broadcast."""

    method: Name
    """Names the pair of learner and method."""
    update_codec: Annotated[str, OneOf(tuple(UPDATE_CODECS))]
    """How the update's values travel."""
    train_seconds: Annotated[float, Within(0, above=True)]
    """The time that local training should fit into: the budget of the choice of k, or of the
    artifact."""
    artifacts: Annotated[tuple[OfferedArtifact, ...], Length(0, MOST_ARTIFACTS)] = ()
    """What the task offers, smallest first, each once; the first one is the manifest's. Empty for a
    task that leaves the artifact to the device."""
    attachments: Annotated[
        tuple[OfferedAttachment, ...], Length(0, MOST_ATTACHMENTS), Rising("name")
    ] = ()
    """What may be fetched beside the broadcast."""
    cohort_keys: Mapping[
        AttachmentName,
        Annotated[tuple[Annotated[bytes, Length(WRAPPED_BYTES)], ...], Length(0, MOST_MEMBERS)],
    ] = field(default_factory=dict)
    """By cohort, its key wrapped for each member."""
    evaluation: EvaluationTerms | None = None
    """What devices find out about the model."""
    predicts: Annotated[str, OneOf(("", "global", "personal"))] = ""
    """Which model is better by the fleet's figures: the received one, or devices' own after
    training. Empty where they do not tell."""

    def check(self) -> None:
        if len({each.artifact_id for each in self.artifacts}) != len(self.artifacts):
            raise ValueError("artifacts holds one of them twice")
        for attachment in self.attachments:
            if attachment.cohort and attachment.cohort not in self.cohort_keys:
                raise ValueError(f"attachment {attachment.name!r} is for a cohort without a key")


@dataclass(frozen=True, slots=True)
class BroadcastHead(Record):
    """What stands before a broadcast's arrays."""

    terms: TaskTerms
    settings: Scalars = field(default_factory=dict)
    """The method's training settings: ``exchange.Broadcast.settings``."""

    MOST_BYTES = MAX_HEAD_BYTES


BROADCAST_CODECS: Mapping[str, Codec] = {
    "float16": Codec.FLOAT16,
    "float32": Codec.FLOAT32,
    "int8": Codec.INT8,
    "int4": Codec.INT4,
}
"""How float32 arrays travel, by the manifest's ``codec`` and, in an update of named arrays
(``arrays/body.py``), by the terms' ``update_codec``."""
_LENGTH = struct.Struct("<I")

# Devices of 0.1.0 refuse terms with fields that they do not know, and leave such settings alone. So
# what came later, and they can do without, travels among the settings: ``terms.control``.

_LATER = (("", "predicts"), ("evaluation", "control"))
"""By name, with the record of the terms that it is in; empty for the terms themselves."""


def _write_head(head: BroadcastHead) -> bytes:
    found = plain(head)
    terms, later = found["terms"], {}
    for place, name in _LATER:
        inside = terms.get(place, {}) if place else terms
        if name in inside:
            later[f"terms.{name}"] = inside.pop(name)
    if later:
        found["settings"] = {**head.settings, **later}
    return cbor.encode(found)


def _read_head(data: bytes) -> BroadcastHead:
    found: Any = cbor.decode(data, limit_bytes=MAX_HEAD_BYTES)
    match found:
        case {"terms": dict(terms), "settings": dict(settings)}:
            for place, name in _LATER:
                inside = terms.get(place) if place else terms
                if isinstance(inside, dict) and f"terms.{name}" in settings:
                    inside[name] = settings.pop(f"terms.{name}")
            if not settings:
                del found["settings"]
    return decode_value(BroadcastHead, found)


def write_broadcast(
    broadcast: Broadcast, terms: TaskTerms, codec: str, rng: np.random.Generator | None = None
) -> bytes:
    """The plaintext of a broadcast; round and version travel in the manifest.

    ``codec``: a key of ``BROADCAST_CODECS``; ``rng`` is needed for ``int8`` and ``int4``. Raises
    ValueError for arrays that no codec carries, and terms above 4 MiB.
    """
    head = _write_head(BroadcastHead(terms, broadcast.settings))
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
    head = _read_head(plaintext[_LENGTH.size : end])
    tensors = decode_tensors(plaintext[end:], limits=UPDATE_LIMITS)
    try:
        broadcast = Broadcast(manifest.round, manifest.version, tensors, head.settings)
    except (TypeError, ValueError) as error:
        raise WireError("bad-field", "the broadcast's settings are not usable") from error
    return head.terms, broadcast


def write_attachment(
    attachment: Attachment, codec: str, rng: np.random.Generator | None = None
) -> bytes:
    """The content of an attachment. Raises ValueError as :func:`write_broadcast` does."""
    tensors, exact = attachment.tensors, attachment.exact
    return encode_tensors(tensors, BROADCAST_CODECS[codec], rng, exact=exact)


def read_attachment(content: bytes, cohort: str) -> Attachment:
    """The attachment in a content that came under its head. Raises ``WireError``."""
    return Attachment(decode_tensors(content, limits=UPDATE_LIMITS), cohort)


# A device's standing: its labels, and the tasks that are for devices with such labels.

MOST_LABELS = 32
MOST_TASKS = 256

Labels = Annotated[Mapping[Name, Annotated[str, Length(1, 64)]], Length(0, MOST_LABELS)]


@dataclass(frozen=True)
class Standing(Record):
    """What a device is told of itself."""

    labels: Labels
    """Its labels: by name a text."""
    tasks: Annotated[tuple[Served, ...], Length(0, MOST_TASKS), Rising()]
    """Those that the device is to take part in."""

    MOST_BYTES = 65_536


def require_labels(labels: Mapping[str, str]) -> None:
    """Raises ValueError, naming the label, for what no device can have."""
    require(Labels, labels, "labels")
