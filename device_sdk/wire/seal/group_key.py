"""Keys that many devices share: a task's group key, and a cohort's."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.record import Record
from device_sdk.wire.seal.keys import RandomBytes, draw

# Group keys: one random key for each key epoch, known to every device that is not revoked.

KEY_BYTES = 32
EPOCH_LIMIT = 2**63 - 1
MOST_KEYS = 16
"""Most group keys in one session reply: the current epoch, the next, and those of broadcasts that
are still retained."""


@dataclass(frozen=True)
class GroupKey:
    """The key (32 bytes) of one epoch."""

    epoch: int
    key: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.epoch <= EPOCH_LIMIT:
            raise ValueError(f"key epoch {self.epoch} is not between 0 and 2^63 - 1")
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"a group key has {KEY_BYTES} bytes, {len(self.key)} given")

    def __repr__(self) -> str:
        return f"GroupKey(epoch={self.epoch}, key=...)"


def new_group_key(epoch: int, random_bytes: RandomBytes = os.urandom) -> GroupKey:
    """A fresh key for ``epoch``."""
    return GroupKey(epoch, draw(random_bytes, KEY_BYTES))


def find_group_key(keys: Iterable[GroupKey], epoch: int) -> GroupKey:
    """The key of ``epoch``. Raises ``WireError("unknown-epoch")``: time to open a new session."""
    for key in keys:
        if key.epoch == epoch:
            return key
    raise WireError("unknown-epoch", f"no group key of epoch {epoch} is known")


def group_keys_to_value(keys: Sequence[GroupKey]) -> list[cbor.CborValue]:
    """The CBOR form: maps {epoch, key}, epochs rising. Raises ``ValueError`` for more than 16."""
    if len(keys) > MOST_KEYS:
        raise ValueError(f"{len(keys)} group keys, at most {MOST_KEYS} travel in one reply")
    if any(low.epoch >= high.epoch for low, high in pairwise(keys)):
        raise ValueError("group keys must be given in rising order of their epochs")
    return [{"epoch": key.epoch, "key": key.key} for key in keys]


def group_keys_from_value(values: list[cbor.CborValue]) -> tuple[GroupKey, ...]:
    """The inverse. Raises ``WireError``: ``bad-field``, ``wrong-fields``."""
    keys: list[GroupKey] = []
    for value in values:
        record = Record(value, ("epoch", "key"))
        key = GroupKey(record.unsigned("epoch", EPOCH_LIMIT), record.octets("key", KEY_BYTES))
        if keys and key.epoch <= keys[-1].epoch:
            raise WireError("bad-field", "the group keys' epochs must rise")
        keys.append(key)
    if len(keys) > MOST_KEYS:
        raise WireError("bad-field", f"more than {MOST_KEYS} group keys")
    return tuple(keys)


# Keys of cohorts: they travel in a broadcast's terms, wrapped for each member.
#
# A member's wrapping key = HKDF-SHA256(its admission key, no salt, info = "tessera/1 cohort" ||
# len(task) 2 || task || len(cohort) 2 || cohort || broadcast id): 32 bytes of key, then 8 of
# label. The label lets the member find its entry and tells everybody else nothing about who it
# is for.

_KEY_BYTES = 32
_LABEL_BYTES = 8
_TAG_BYTES = 16
WRAPPED_BYTES = _LABEL_BYTES + _KEY_BYTES + _TAG_BYTES
"""Label, sealed key and tag of one member: 56 bytes."""
_NONCE = bytes(12)  # a wrapping key seals once: the broadcast id is drawn for each publication


def wrap_cohort_key(
    cohort_key: bytes, admission_keys: Iterable[bytes], task: str, cohort: str, broadcast_id: bytes
) -> tuple[bytes, ...]:
    """``cohort_key`` for each member, 56 bytes each, in the order of their labels."""
    if len(cohort_key) != _KEY_BYTES:
        raise ValueError(f"a cohort key has {_KEY_BYTES} bytes")
    wrapped = []
    for admission_key in admission_keys:
        key, label = _derive(admission_key, task, cohort, broadcast_id)
        wrapped.append(label + ChaCha20Poly1305(key).encrypt(_NONCE, cohort_key, label))
    return tuple(sorted(wrapped))


def unwrap_cohort_key(
    wrapped: Sequence[bytes], admission_key: bytes, task: str, cohort: str, broadcast_id: bytes
) -> bytes | None:
    """The cohort's key; None where no entry is for this device.

    Raises ``WireError("bad-tag")`` for an entry with this device's label that does not open.
    """
    key, label = _derive(admission_key, task, cohort, broadcast_id)
    for entry in wrapped:
        if entry[:_LABEL_BYTES] == label:
            try:
                return ChaCha20Poly1305(key).decrypt(_NONCE, entry[_LABEL_BYTES:], label)
            except InvalidTag as error:
                raise WireError("bad-tag", "a cohort's key is not sealed for its member") from error
    return None


def _derive(
    admission_key: bytes, task: str, cohort: str, broadcast_id: bytes
) -> tuple[bytes, bytes]:
    info = b"tessera/1 cohort"
    for name in (task.encode(), cohort.encode()):
        info += struct.pack("<H", len(name)) + name
    kdf = HKDF(
        algorithm=SHA256(), length=_KEY_BYTES + _LABEL_BYTES, salt=None, info=info + broadcast_id
    )
    derived = kdf.derive(admission_key)
    return derived[:_KEY_BYTES], derived[_KEY_BYTES:]
