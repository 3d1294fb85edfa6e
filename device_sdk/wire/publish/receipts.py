"""What travels inside a session: updates, contributions and farewells up, receipts down."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Annotated, NamedTuple

from device_sdk.fields import Declared, Length
from device_sdk.wire.codec.errors import Slug, WireError
from device_sdk.wire.codec.message import Count, Name, Record, encode, read_name

DIGEST_BYTES = 32
_LABEL = b"tessera/1 update\x00"
_LEAVE_LABEL = b"tessera/1 leave\x00"
_HEAD = struct.Struct("<QQB")
_LENGTH = struct.Struct("<H")
_LIMIT = 2**63 - 1


class RecordType(IntEnum):
    """Types of messages inside an envelope."""

    UPDATE = 16
    RECEIPT = 17
    CONTRIBUTION = 18
    """An update with a report, or a report alone."""
    STANDING = 19
    LEAVE = 20
    PLACEMENT = 21


@dataclass(frozen=True, slots=True)
class UpdateIdentity(Declared):
    """Which update this is: a device has one for each round of a generation of a task."""

    device_id: Annotated[bytes, Length(1, 32)]
    task: Name
    generation: Count
    round: Count


class UpdateMessage(NamedTuple):
    """An update as it arrived: who and when, and the body that a method's codec reads.

    Attributes:
        body_sha256: says which update it is, with a report or without one: of a report alone it is
            ``content_sha256``.
        content_sha256: of all that follows the head, which is what a receipt names.
        report: of a contribution, as it came; its ``body`` is empty where the round ended without
            an update. None for a plain update.
    """

    identity: UpdateIdentity
    body: bytes
    body_sha256: bytes
    content_sha256: bytes
    report: bytes | None = None


def write_update(identity: UpdateIdentity, body: bytes) -> bytes:
    """Bytes: ``generation 8 | round 8 | task length 1 | task | body``, little-endian.

    The device is not in them: it is the session's.
    """
    task = identity.task.encode()
    return _HEAD.pack(identity.generation, identity.round, len(task)) + task + body


def read_update(payload: bytes, device_id: bytes) -> UpdateMessage:
    """Parse an update from the session of ``device_id``.

    Raises ``WireError``: ``truncated``, ``bad-name``, ``bad-field``.
    """
    if len(payload) < _HEAD.size:
        raise WireError("truncated", f"{len(payload)} bytes are too few for an update")
    start = _HEAD.size + payload[_HEAD.size - 1]
    if len(payload) < start:
        raise WireError("truncated", "the update ends within its task's name")
    identity = UpdateIdentity(device_id, *_read_head(payload[:start]))
    body = payload[start:]
    digest = hashlib.sha256(body).digest()
    return UpdateMessage(identity, body, digest, digest)


def with_report(report: bytes, body: bytes) -> bytes:
    """What follows the head of a contribution: ``report length 2 | report | body``.

    One thing with one digest, as an update's body is: :func:`write_update` puts the head in front.
    """
    return _LENGTH.pack(len(report)) + report + body


def read_contribution(payload: bytes, device_id: bytes) -> UpdateMessage:
    """Parse a contribution from the session of ``device_id``; its report is not looked into.

    Raises ``WireError`` as :func:`read_update` does.
    """
    identity, content, _, digest, _ = read_update(payload, device_id)
    if len(content) < _LENGTH.size:
        raise WireError("truncated", "the contribution ends before its report")
    end = _LENGTH.size + _LENGTH.unpack_from(content)[0]
    if len(content) < end:
        raise WireError("truncated", "the contribution ends within its report")
    report, body = content[_LENGTH.size : end], content[end:]
    body_sha256 = hashlib.sha256(body).digest() if body else digest
    return UpdateMessage(identity, body, body_sha256, digest, report)


# All updates of a round begin with the same bytes.
@lru_cache(maxsize=64)
def _read_head(head: bytes) -> tuple[str, int, int]:
    """Task, generation and round."""
    generation, round_number, _ = _HEAD.unpack_from(head)
    if generation > _LIMIT or round_number > _LIMIT:
        raise WireError("bad-field", "generation and round are at most 2^63 - 1")
    return read_name("task", head[_HEAD.size :]), generation, round_number


def update_digest(identity: UpdateIdentity, content_sha256: bytes) -> bytes:
    """32 bytes that name one update, as it was sent, in a receipt.

    SHA-256("tessera/1 update" || 0 || device id length 1 || device id || update header ||
    SHA-256 of what follows the header). The content's hash alone would let the receipt of one round
    be taken for that of another round with an equal body.
    """
    if len(content_sha256) != DIGEST_BYTES:
        raise ValueError(f"a SHA-256 has {DIGEST_BYTES} bytes, {len(content_sha256)} given")
    device = bytes((len(identity.device_id),)) + identity.device_id
    return hashlib.sha256(_LABEL + device + write_update(identity, content_sha256)).digest()


def leave_digest(device_id: bytes) -> bytes:
    """32 bytes that name a device's farewell in its receipt: a record without content."""
    return hashlib.sha256(_LEAVE_LABEL + device_id).digest()


class Verdict(Enum):
    """What became of an update."""

    COUNTED = "counted"
    NOTED = "noted"
    """A contribution without an update, or a farewell: there was nothing to count."""
    LATE = "late"
    REFUSED = "refused"
    FORGOTTEN = "forgotten"
    CONFLICT = "conflict"
    """Another body was committed for the same identity."""

    __hash__ = object.__hash__  # each receipt is found by it; that of the name takes longer


_REFUSED = Verdict.REFUSED  # an enumeration's attribute takes longer to find


@dataclass(frozen=True, slots=True)
class Receipt(Record):
    """The aggregator's final word on an update."""

    digest: Annotated[bytes, Length(DIGEST_BYTES)]
    """Of the update, as :func:`update_digest` has it."""
    verdict: Verdict
    reason: Slug = ""
    """Why it was refused."""

    MOST_BYTES = 256

    def check(self) -> None:
        if (self.verdict is _REFUSED) is (not self.reason):
            raise ValueError("a reason goes with a refusal, and with nothing else")


def write_receipt(receipt: Receipt) -> bytes:
    """As :func:`~device_sdk.wire.codec.message.encode` does, some times faster."""
    before, after = _around_digest(receipt.verdict, receipt.reason)
    return before + receipt.digest + after


# A fleet's receipts differ in their digests, and in little else.
@lru_cache(maxsize=64)
def _around_digest(verdict: Verdict, reason: str) -> tuple[bytes, bytes]:
    digest = bytes(DIGEST_BYTES)
    before, after = encode(Receipt(digest, verdict, reason)).split(digest)
    return before, after
