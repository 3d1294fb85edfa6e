"""A broadcast's manifest: its body and its chunks, whom it selects, and which may follow which."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from device_sdk.evaluation.report import EvaluationTerms
from device_sdk.fields import Length, Within
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Count, Name, Record
from device_sdk.wire.seal.broadcast import BroadcastKeys, Publication, open_chunk, read_chunk_index

CHUNK_BYTES = 64 * 1024
"""Plaintext bytes of each chunk of a broadcast but the last; fewer where the broker takes no such
messages."""
MAX_BODY_BYTES = 90 * 1024
"""Leaves room for seal, signature and clear fields within one message of 96 KiB."""
MOST_CHUNKS = 2560
"""160 MiB a broadcast: as many hashes as fit a manifest."""
EVERYONE = 2**64 - 1
"""The highest threshold. It leaves out one device in 2^64."""

_SELECT_LABEL = b"tessera/1 select\x00"
_EVALUATE_LABEL = b"tessera/1 evaluate\x00"
_CONTROL_LABEL = b"tessera/1 control\x00"
Digest = Annotated[bytes, Length(32)]
Chunks = Annotated[tuple[Digest, ...], Length(0, MOST_CHUNKS)]


@dataclass(frozen=True, slots=True)
class RoundManifest(Record):
    """One publication of a task to a cohort."""

    root_fingerprint: Annotated[bytes, Length(16)]
    task: Name
    cohort: Name
    generation: Count
    """Unix time of ``init`` or of the last restore from a backup."""
    round: Count
    version: Count
    artifact_id: Digest
    catalogue_id: Digest
    """Zeros for a task without a catalogue."""
    broadcast_id: Digest
    key_epoch: Count
    sampling_seed: Digest
    threshold: Annotated[int, Within(0, EVERYONE)]
    """Selected below it: the expected share of devices times 2^64."""
    opened_unix_seconds: Count
    """When the aggregator opened the round and signed this."""
    deadline_unix_seconds: Count
    """Not before ``opened_unix_seconds``. From then on it is not acted upon; a device counts the
    seconds left by its own clock."""
    codec: Name
    length: Annotated[int, Within(0, CHUNK_BYTES * MOST_CHUNKS)]
    """Plaintext bytes of the broadcast."""
    chunks: Chunks
    """SHA-256 of each chunk's message, in order: at least ``length`` / 65,536, at most ``length``.
    Each chunk has 1 to 65,536 plaintext bytes, as the broker's largest packet has it."""

    MOST_BYTES = MAX_BODY_BYTES

    def check(self) -> None:
        if self.deadline_unix_seconds < self.opened_unix_seconds:
            raise ValueError("deadline_unix_seconds lies before opened_unix_seconds")
        require_chunks(len(self.chunks), self.length)

    def selects(self, device_id: bytes) -> bool:
        """Whether a device takes part in the round: see :func:`selected`."""
        return selected(self.sampling_seed, self.threshold, self.task, self.round, device_id)


def chunk_count(length: int) -> int:
    """The least number of chunks of ``length`` plaintext bytes; of an empty one there are none."""
    return -(-length // CHUNK_BYTES)


def require_chunks(count: int, length: int) -> None:
    """Raises ValueError where ``length`` plaintext bytes cannot have so many chunks: each has 1 to
    ``CHUNK_BYTES``. How many it is, is for the broker's largest message to say."""
    least = -(-length // CHUNK_BYTES)
    if not least <= count <= length:
        raise ValueError(f"{count} chunks for {length} bytes; expected {least} or more")


def selected(
    sampling_seed: bytes, threshold: int, task: str, round_number: int, device_id: bytes
) -> bool:
    """Whether a device takes part in a round.

    The first 8 bytes, as a little-endian integer, of SHA-256("tessera/1 select" || 0 || seed 32 ||
    task length 1 || task || round 8 || device id) are below ``threshold``. Only the device id,
    which comes last, has no length of its own. Raises ValueError for a seed that is not 32 bytes or
    a threshold above 2^64.
    """
    if not 0 <= threshold <= 2**64:
        raise ValueError("expected a threshold from 0 to 2^64")
    return _draw(_SELECT_LABEL, sampling_seed, task, round_number, device_id) < threshold


def evaluates(manifest: RoundManifest, terms: EvaluationTerms, device_id: bytes) -> bool:
    """Whether a device that takes part in a round also evaluates in it."""
    return evaluates_in(terms, manifest.sampling_seed, manifest.task, manifest.round, device_id)


def evaluates_in(
    terms: EvaluationTerms, sampling_seed: bytes, task: str, round_number: int, device_id: bytes
) -> bool:
    """:func:`evaluates`, by what it goes by.

    Its draw is as in :func:`selected`, under the label "tessera/1 evaluate" and with the terms'
    threshold.
    """
    if round_number % terms.every_rounds:
        return False
    return _draw(_EVALUATE_LABEL, sampling_seed, task, round_number, device_id) < terms.threshold


def is_control(terms: EvaluationTerms, task: str, device_id: bytes) -> bool:
    """Whether a device is of a task's control arm: in all rounds, or in none.

    Its draw is as in :func:`selected`, under the label "tessera/1 control", with a seed of zeros,
    round 0 and the terms' ``control_threshold``.
    """
    return _draw(_CONTROL_LABEL, bytes(32), task, 0, device_id) < terms.control_threshold


def _draw(label: bytes, seed: bytes, task: str, round_number: int, device_id: bytes) -> int:
    if len(seed) != 32:
        raise ValueError("expected a seed of 32 bytes")
    name = task.encode()
    digest = hashlib.sha256(
        label
        + seed
        + struct.pack("<B", len(name))
        + name
        + struct.pack("<Q", round_number)
        + device_id
    ).digest()
    return int.from_bytes(digest[:8], "little")


@dataclass(frozen=True, slots=True)
class Mark:
    """What a device persists of the newest manifest it accepted for a task and cohort."""

    generation: int
    round: int
    version: int
    sha256: bytes
    """Of the manifest's body."""


class Order(Enum):
    """How a manifest relates to the newest accepted one."""

    NEWER = "newer"
    SAME = "same"


def order(mark: Mark | None, manifest: RoundManifest, body: bytes) -> tuple[Order, Mark]:
    """Judge a verified manifest by the persisted mark; returns the mark to persist.

    (generation, round) must rise, and the version never falls within a generation; the same body
    again is ``SAME``, to be ignored. Raises ``WireError``: ``stale-manifest``, ``version-fell``.
    """
    new = Mark(manifest.generation, manifest.round, manifest.version, hashlib.sha256(body).digest())
    if mark is None:
        return Order.NEWER, new
    if new == mark:
        return Order.SAME, mark
    if (new.generation, new.round) <= (mark.generation, mark.round):
        raise WireError(
            "stale-manifest",
            f"generation {new.generation} round {new.round} does not follow generation "
            f"{mark.generation} round {mark.round}",
        )
    if new.generation == mark.generation and new.version < mark.version:
        raise WireError("version-fell", f"version {new.version} follows version {mark.version}")
    return Order.NEWER, new


# A plaintext cut into a publication's chunks, and collected again in any order of arrival.


def seal_chunks(
    publication: Publication, plaintext: bytes, chunk_bytes: int = CHUNK_BYTES
) -> tuple[list[bytes], tuple[bytes, ...]]:
    """The chunk messages of ``plaintext``, in order, and the SHA-256 of each."""
    messages = [
        publication.seal_chunk(plaintext[at : at + chunk_bytes])
        for at in range(0, len(plaintext), chunk_bytes)
    ]
    return messages, tuple(hashlib.sha256(message).digest() for message in messages)


@dataclass(slots=True)
class ChunkSet:
    """Collects the chunks that a verified manifest (or content head) names.

    Memory is that of the chunks received. ``digests`` and ``length`` are the manifest's. Raises
    ValueError when their numbers disagree.
    """

    _keys: BroadcastKeys
    _broadcast_id: bytes
    _digests: Sequence[bytes]
    _length: int
    _parts: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_chunks(len(self._digests), self._length)

    @property
    def missing(self) -> int:
        """How many chunks have not come yet."""
        return len(self._digests) - len(self._parts)

    def digests(self) -> Iterator[tuple[int, bytes]]:
        """Index and SHA-256 of each chunk's message that has not come yet."""
        for index, digest in enumerate(self._digests):
            if index not in self._parts:
                yield index, digest

    def add(self, message: bytes) -> bool:
        """Take a chunk's message; whether all are there now. One that came before is ignored.

        Raises ``WireError``: ``wrong-chunk``, ``bad-tag``, or a parser's reason.
        """
        index = read_chunk_index(message)
        if index >= len(self._digests):
            raise WireError("wrong-chunk", "a chunk beyond the last one that the manifest names")
        if index not in self._parts:
            self._parts[index] = open_chunk(
                message, self._keys, self._broadcast_id, index, self._digests[index]
            )
        return not self.missing

    def plaintext(self) -> bytes:
        """The whole. Raises ValueError while chunks are missing, ``WireError("wrong-length")``."""
        if self.missing:
            raise ValueError(f"{self.missing} chunks are missing")
        whole = b"".join(self._parts[index] for index in range(len(self._digests)))
        if len(whole) != self._length:
            raise WireError("wrong-length", "the chunks do not make the length announced")
        return whole
