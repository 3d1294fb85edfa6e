"""Group keys: one random key for each key epoch, known to every device that is not revoked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.record import Record
from device_sdk.wire.seal.keys import RandomBytes, draw

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


def group_keys_to_value(keys: Sequence[GroupKey]) -> list[cbor.Value]:
    """The CBOR form: maps {epoch, key}, epochs rising. Raises ``ValueError`` for more than 16."""
    if len(keys) > MOST_KEYS:
        raise ValueError(f"{len(keys)} group keys, at most {MOST_KEYS} travel in one reply")
    if any(low.epoch >= high.epoch for low, high in pairwise(keys)):
        raise ValueError("group keys must be given in rising order of their epochs")
    return [{"epoch": key.epoch, "key": key.key} for key in keys]


def group_keys_from_value(values: list[cbor.Value]) -> tuple[GroupKey, ...]:
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
