"""Keys of cohorts: they travel in a broadcast's terms, wrapped for each member.

A member's wrapping key = HKDF-SHA256(its admission key, no salt, info = "tessera/1 cohort" ||
len(task) 2 || task || len(cohort) 2 || cohort || broadcast id): 32 bytes of key, then 8 of label.
The label lets the member find its entry and tells everybody else nothing about who it is for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from device_sdk.wire.codec.errors import WireError

__all__ = ["WRAPPED_BYTES", "unwrap_cohort_key", "wrap_cohort_key"]

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
