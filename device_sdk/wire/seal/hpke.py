"""Single-shot HPKE (RFC 9180, base mode) with the protocol's one cipher suite.

The suite: KEM MLKEM768-X25519 (hybrid: safe while either half is), KDF HKDF-SHA256, AEAD
ChaCha20-Poly1305. Base mode does not authenticate the sender: every sealed message of the protocol
carries a signature or a proof of its own. The encapsulation draws its randomness inside
``cryptography``; it is the one place where it cannot be passed in, which is why functions that
seal take the sealer as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import (
    MLKEM768PrivateKey,
    MLKEM768PublicKey,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from device_sdk.wire.codec.errors import WireError

PrivateKey: TypeAlias = MLKEM768X25519PrivateKey
PublicKey: TypeAlias = MLKEM768X25519PublicKey
Seal: TypeAlias = Callable[[PublicKey, bytes, bytes], bytes]
Unseal: TypeAlias = Callable[[PrivateKey, bytes, bytes], bytes]

SEED_BYTES = 96  # ML-KEM-768 seed d || z (64), X25519 scalar (32)
PUBLIC_KEY_BYTES = 1216  # ML-KEM-768 encapsulation key (1,184), X25519 public key (32)
OVERHEAD_BYTES = 1136  # ML-KEM-768 ciphertext (1,088), X25519 ephemeral key (32), tag (16)

_MLKEM_SEED_BYTES = 64
_MLKEM_PUBLIC_BYTES = 1184
_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


def seal(key: PublicKey, info: bytes, plaintext: bytes) -> bytes:
    """``plaintext`` for the holder of ``key``: encapsulation || ciphertext || tag.

    The result is ``OVERHEAD_BYTES`` longer. ``info`` is bound to it: the same has to be given to
    :func:`unseal`. Raises ``WireError("bad-key")`` for a key with which no secret can be agreed.
    """
    try:
        return _SUITE.encrypt(plaintext, key, info=info)
    except ValueError as error:
        raise WireError("bad-key", "no secret can be agreed with this HPKE public key") from error


def unseal(key: PrivateKey, info: bytes, sealed: bytes) -> bytes:
    """The plaintext that was sealed to ``key``'s public key with ``info``.

    Raises ``WireError("cannot-unseal")`` for anything else.
    """
    try:
        return _SUITE.decrypt(sealed, key, info=info)
    except (InvalidTag, ValueError) as error:
        raise WireError("cannot-unseal", "not sealed to this key in this context") from error


def private_key(seed: bytes) -> PrivateKey:
    """The key pair of a 96-byte seed. Raises ``ValueError`` for another length."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"an HPKE key's seed has {SEED_BYTES} bytes, {len(seed)} given")
    return MLKEM768X25519PrivateKey(
        MLKEM768PrivateKey.from_seed_bytes(seed[:_MLKEM_SEED_BYTES]),
        X25519PrivateKey.from_private_bytes(seed[_MLKEM_SEED_BYTES:]),
    )


def public_bytes(seed: bytes) -> bytes:
    """The 1,216 bytes of the public key that belongs to a 96-byte seed."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"an HPKE key's seed has {SEED_BYTES} bytes, {len(seed)} given")
    mlkem = MLKEM768PrivateKey.from_seed_bytes(seed[:_MLKEM_SEED_BYTES])
    x25519 = X25519PrivateKey.from_private_bytes(seed[_MLKEM_SEED_BYTES:])
    return mlkem.public_key().public_bytes_raw() + x25519.public_key().public_bytes_raw()


def public_key(raw: bytes) -> PublicKey:
    """The public key of 1,216 bytes. Raises ``WireError("bad-key")``."""
    if len(raw) != PUBLIC_KEY_BYTES:
        raise WireError(
            "bad-key",
            f"an HPKE public key has {PUBLIC_KEY_BYTES} bytes, {len(raw)} received",
        )
    try:
        mlkem = MLKEM768PublicKey.from_public_bytes(raw[:_MLKEM_PUBLIC_BYTES])
        x25519 = X25519PublicKey.from_public_bytes(raw[_MLKEM_PUBLIC_BYTES:])
    except ValueError as error:
        raise WireError("bad-key", "not an ML-KEM-768 encapsulation key") from error
    return MLKEM768X25519PublicKey(mlkem, x25519)
