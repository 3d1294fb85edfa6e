"""What devices of a task or cohort share: keys, and the publications sealed under them.

A publication is a signed manifest and its chunks.

A publication's keys = HKDF-SHA256(group key, salt = broadcast id, info = task, cohort, epoch,
part). The group key proves nothing about the sender, for every device holds it: the manifest's
signature does, and the manifest names the SHA-256 of every chunk message.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from device_sdk.fields import Declared, Length, Rising
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Count, MessageType, check_prefix, prefix
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.keys import RandomBytes, draw
from device_sdk.wire.seal.session import MAX_MESSAGE_BYTES
from device_sdk.wire.seal.signature import SIGNATURE_BYTES, Purpose

# A group key: one random key for each key epoch, known to every device that is not revoked.

KEY_BYTES = 32
EPOCH_LIMIT = 2**63 - 1
MOST_KEYS = 16
"""Most group keys in one session reply: the current epoch, the next, and those of broadcasts that
are still retained."""


@dataclass(frozen=True)
class GroupKey(Declared):
    """The key of one epoch."""

    epoch: Count
    key: Annotated[bytes, Length(KEY_BYTES)]

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


GroupKeys = Annotated[tuple[GroupKey, ...], Length(0, MOST_KEYS), Rising("epoch")]


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


BROADCAST_ID_BYTES = 32
MAX_MANIFEST_BYTES = MAX_MESSAGE_BYTES
MOST_CHUNKS = 2**32 - 1
_TAG_BYTES = 16
_MANIFEST_HEAD = struct.Struct("<BBQ32s")
_CHUNK_HEAD = struct.Struct("<BBI32s")
MAX_MANIFEST_BODY_BYTES = MAX_MANIFEST_BYTES - _MANIFEST_HEAD.size - SIGNATURE_BYTES - _TAG_BYTES
MAX_CHUNK_PAYLOAD_BYTES = MAX_MESSAGE_BYTES - _CHUNK_HEAD.size - _TAG_BYTES
"""The most one chunk carries: 98,250 bytes."""


@dataclass(frozen=True)
class BroadcastKeys:
    """The two keys of one publication."""

    manifest: bytes
    chunks: bytes

    def __repr__(self) -> str:
        return "BroadcastKeys(...)"


@dataclass(frozen=True)
class ManifestLabel:
    """What stands outside a manifest. Proven only once the manifest was opened."""

    epoch: int
    broadcast_id: bytes


def derive_broadcast_keys(
    group_key: GroupKey, broadcast_id: bytes, task: str, cohort: str
) -> BroadcastKeys:
    """Keys of a publication for ``cohort`` of ``task`` under an epoch's group key.

    info = "tessera/1 broadcast" || len(task) 2 || task || len(cohort) 2 || cohort || epoch 8 ||
    "manifest" or "chunks"; names in UTF-8, numbers little-endian.
    """
    if len(broadcast_id) != BROADCAST_ID_BYTES:
        raise ValueError(f"a broadcast id has {BROADCAST_ID_BYTES} bytes")
    context = b"tessera/1 broadcast"
    for name in (task.encode(), cohort.encode()):
        # Lengths in front: task "ab" with cohort "c" must not give the keys of "a" with "bc".
        context += struct.pack("<H", len(name)) + name
    context += struct.pack("<Q", group_key.epoch)
    kdfs = (
        HKDF(algorithm=SHA256(), length=32, salt=broadcast_id, info=context + part)
        for part in (b"manifest", b"chunks")
    )
    return BroadcastKeys(*(kdf.derive(group_key.key) for kdf in kdfs))


class Publication:
    """Seals one publication: chunks in order, then the manifest, once.

    The broadcast id is drawn here and the counters live here, so that no key can meet the same
    nonce with two contents. To publish again after a crash, send the stored messages again; a
    publication that was not stored is made anew, under a new id.
    """

    def __init__(
        self, group_key: GroupKey, task: str, cohort: str, random_bytes: RandomBytes = os.urandom
    ) -> None:
        self.epoch = group_key.epoch
        self.broadcast_id = draw(random_bytes, BROADCAST_ID_BYTES)
        self._keys = derive_broadcast_keys(group_key, self.broadcast_id, task, cohort)
        self._next_index = 0
        self._is_closed = False

    def seal_chunk(self, payload: bytes) -> bytes:
        """The next chunk's message, of at most 96 KiB. Its SHA-256 belongs into the manifest.

        Raises ``ValueError`` for more than ``MAX_CHUNK_PAYLOAD_BYTES`` and after the manifest.
        """
        if self._is_closed:
            raise ValueError("the manifest is sealed: a chunk more would not be named in it")
        if len(payload) > MAX_CHUNK_PAYLOAD_BYTES:
            raise ValueError(f"a chunk carries at most {MAX_CHUNK_PAYLOAD_BYTES} bytes")
        index = self._next_index
        self._next_index += 1
        head = _CHUNK_HEAD.pack(*prefix(MessageType.CHUNK), index, self.broadcast_id)
        cipher = ChaCha20Poly1305(self._keys.chunks)
        return head + cipher.encrypt(index.to_bytes(12, "little"), payload, head)

    def seal_manifest(self, body: bytes, signing: Ed25519PrivateKey) -> bytes:
        """The manifest's message: ``body`` signed and sealed. Raises ``ValueError`` if repeated."""
        if self._is_closed:
            raise ValueError("a publication has one manifest; make another publication")
        if len(body) > MAX_MANIFEST_BODY_BYTES:
            raise ValueError(f"a manifest's body has at most {MAX_MANIFEST_BODY_BYTES} bytes")
        self._is_closed = True
        head = _MANIFEST_HEAD.pack(*prefix(MessageType.MANIFEST), self.epoch, self.broadcast_id)
        signed = signature.sign(signing, Purpose.MANIFEST, head + body)
        # The nonce may be zero: this key seals this one message.
        return head + ChaCha20Poly1305(self._keys.manifest).encrypt(bytes(12), signed + body, head)


def read_manifest_label(message: bytes) -> ManifestLabel:
    """Epoch and broadcast id of a manifest message, to find the keys with."""
    least = _MANIFEST_HEAD.size + SIGNATURE_BYTES + _TAG_BYTES
    check_prefix(message, MessageType.MANIFEST, least, MAX_MANIFEST_BYTES)
    _, _, epoch, broadcast_id = _MANIFEST_HEAD.unpack_from(message)
    if epoch > EPOCH_LIMIT:
        raise WireError("bad-field", "a key epoch above 2^63 - 1")
    return ManifestLabel(epoch, broadcast_id)


def open_manifest(message: bytes, keys: BroadcastKeys, signing: Ed25519PublicKey) -> bytes:
    """The body of a manifest. The caller compares epoch and id inside with those outside.

    Raises ``WireError``: ``bad-tag``, ``bad-signature``, or a parser's reason.
    """
    read_manifest_label(message)
    head = message[: _MANIFEST_HEAD.size]
    opened = _decrypt(keys.manifest, bytes(12), message[_MANIFEST_HEAD.size :], head)
    signed, body = opened[:SIGNATURE_BYTES], opened[SIGNATURE_BYTES:]
    signature.verify(signing, Purpose.MANIFEST, head + body, signed)
    return body


def read_chunk_index(message: bytes) -> int:
    """The index that a chunk message claims. Raises ``WireError`` for another message."""
    check_prefix(message, MessageType.CHUNK, _CHUNK_HEAD.size + _TAG_BYTES, MAX_MESSAGE_BYTES)
    return int(_CHUNK_HEAD.unpack_from(message)[2])


def open_chunk(
    message: bytes, keys: BroadcastKeys, broadcast_id: bytes, index: int, sha256: bytes
) -> bytes:
    """The payload of chunk ``index``, whose message has the SHA-256 that the manifest names.

    Raises ``WireError``: ``wrong-chunk``, ``bad-tag``, or a parser's reason.
    """
    claimed = read_chunk_index(message)
    head = message[: _CHUNK_HEAD.size]
    if claimed != index or head[-BROADCAST_ID_BYTES:] != broadcast_id:
        raise WireError("wrong-chunk", "a chunk of another place or publication")
    if hashlib.sha256(message).digest() != sha256:
        raise WireError("wrong-chunk", "not the chunk that the manifest names")
    nonce = index.to_bytes(12, "little")
    return _decrypt(keys.chunks, nonce, message[_CHUNK_HEAD.size :], head)


def _decrypt(key: bytes, nonce: bytes, sealed: bytes, associated: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, sealed, associated)
    except InvalidTag as error:
        raise WireError("bad-tag", "not sealed under this publication's keys") from error
