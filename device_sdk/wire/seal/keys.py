"""Long-lived secret keys: how they are made, and how they lie on disk.

A key file is one line of ASCII, ``tessera-key 1 <kind> <base64 of the secret>``, mode 0600. It is
written under a temporary name, flushed, given its name without ever replacing a file, and the
folder is flushed: after :func:`write_key` returns, a power cut does not lose the key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.system.files import flush_file, flush_folder
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import hpke

RandomBytes: TypeAlias = Callable[[int], bytes]
"""``random_bytes(n)`` gives n bytes; ``os.urandom`` outside tests."""

FINGERPRINT_BYTES = 16
_ED25519_SEED_BYTES = 32
_MAX_FILE_BYTES = 512
_MAGIC = "tessera-key"
_FORMAT = "1"


class KeyKind(Enum):
    """What a key file holds. The value is the word in the file."""

    ED25519 = "ed25519"
    HPKE = "mlkem768-x25519"
    SYMMETRIC = "symmetric-256"

    @property
    def secret_bytes(self) -> int:
        """Length of the secret in bytes."""
        return {
            KeyKind.ED25519: _ED25519_SEED_BYTES,
            KeyKind.HPKE: hpke.SEED_BYTES,
            KeyKind.SYMMETRIC: 32,
        }[self]


def generate(kind: KeyKind, random_bytes: RandomBytes = os.urandom) -> bytes:
    """A new secret: an Ed25519 seed (32 bytes), an HPKE seed (96) or a symmetric key (32)."""
    return draw(random_bytes, kind.secret_bytes)


def draw(random_bytes: RandomBytes, count: int) -> bytes:
    """``count`` bytes, refusing a source that gives another number of them."""
    drawn = random_bytes(count)
    if len(drawn) != count:
        raise ValueError(f"the random source gave {len(drawn)} bytes, {count} asked for")
    return drawn


def signing_key(seed: bytes) -> Ed25519PrivateKey:
    """The Ed25519 key of a 32-byte seed. Raises ``ValueError`` for another length."""
    return Ed25519PrivateKey.from_private_bytes(seed)


def fingerprint(root_public_key: bytes) -> bytes:
    """16 bytes that stand for the root key in enrolment codes and manifests."""
    return hashlib.sha256(b"tessera/1 root\x00" + root_public_key).digest()[:FINGERPRINT_BYTES]


def write_key(path: Path, kind: KeyKind, secret: bytes) -> None:
    """Write a new key file, mode 0600, flushed to disk together with its folder.

    Raises ``FileExistsError`` when ``path`` exists: a key is never overwritten.
    """
    if len(secret) != kind.secret_bytes:
        raise ValueError(
            f"a {kind.value} key has {kind.secret_bytes} bytes, {len(secret)} were given"
        )
    line = f"{_MAGIC} {_FORMAT} {kind.value} {base64.b64encode(secret).decode()}\n"
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)  # left behind by a crash of a process with our number
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(line.encode())
            file.flush()
            flush_file(file.fileno())
        os.link(temporary, path)  # unlike a rename, a link never replaces what is there
    finally:
        temporary.unlink()
    flush_folder(path.parent)


def read_key(path: Path, kind: KeyKind) -> bytes:
    """The secret in a key file.

    Raises ``WireError("bad-key-file")`` when others can read the file, or when it is not a key
    file of this kind; ``OSError`` when it cannot be read at all.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _bad_file(path, "is not a regular file")
        if os.name == "posix" and stat.S_IMODE(status.st_mode) & 0o077:
            raise _bad_file(path, "can be read by others; run chmod 600 on it")
        line = file.read(_MAX_FILE_BYTES + 1)
    words = line.decode("ascii", "replace").split()
    if len(words) != 4 or words[:2] != [_MAGIC, _FORMAT]:
        raise _bad_file(path, f"is not a key file of format {_FORMAT}")
    if words[2] != kind.value:
        raise _bad_file(path, f"holds another kind of key, expected {kind.value}")
    try:
        secret = base64.b64decode(words[3], validate=True)
    except binascii.Error as error:
        raise _bad_file(path, "holds broken base64") from error
    if len(secret) != kind.secret_bytes:
        raise _bad_file(path, f"holds {len(secret)} bytes, expected {kind.secret_bytes}")
    return secret


def erase_key(path: Path) -> None:
    """Overwrite a key file and remove it; on the disk when this returns. None there is right too.

    It loses its name first: nobody meets half a key, and what a crash leaves over has the name of a
    temporary file. What the file system or the drive copied elsewhere by itself is out of reach.
    """
    temporary = path if path.name.endswith(".tmp") else _temporary(path)
    try:
        os.replace(path, temporary)
    except FileNotFoundError:
        return
    handle = os.open(temporary, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(handle, "wb") as file:
        status = os.fstat(file.fileno())
        # Under a second name it is somebody's good key: a crash in write_key leaves one so.
        if status.st_nlink == 1:
            file.write(bytes(status.st_size))
            file.flush()
            flush_file(file.fileno())
    temporary.unlink()
    flush_folder(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _bad_file(path: Path, what: str) -> WireError:
    return WireError("bad-key-file", f"{path} {what}")
