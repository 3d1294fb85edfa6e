"""Padding of plaintexts to size buckets: eight to each doubling.

A ciphertext's length tells the broker how much a device touched. Rounded up, it tells one of eight
sizes an octave, for at most an eighth more bytes (and at least 128).
"""

from __future__ import annotations

from device_sdk.wire.codec.errors import WireError

LEAST_BYTES = 128


def padded_length(length: int, most: int) -> int:
    """Bytes that a plaintext of ``length`` takes once padded; at most ``most``.

    Raises ``ValueError`` when ``length`` and the one mark byte do not fit into ``most``.
    """
    needed = length + 1
    if needed > most:
        raise ValueError(f"{length} bytes do not fit into {most} with their padding")
    step = 1 << max(0, needed.bit_length() - 4)
    return min(most, max(LEAST_BYTES, -(-needed // step) * step))


def pad(plaintext: bytes, most: int) -> bytes:
    """``plaintext`` || 0x80 || zeros (ISO/IEC 7816-4), :func:`padded_length` bytes long."""
    total = padded_length(len(plaintext), most)
    return plaintext + b"\x80" + bytes(total - len(plaintext) - 1)


def unpad(padded: bytes, most: int) -> bytes:
    """What :func:`pad` was given. Raises ``WireError("bad-padding")``.

    Padding to another length than the rule's is refused too: it would be a way to mark messages.
    """
    end = len(padded.rstrip(b"\x00")) - 1
    if end < 0 or padded[end] != 0x80:
        raise WireError("bad-padding", "the padding's mark is missing")
    if len(padded) > most or len(padded) != padded_length(end, most):
        raise WireError("bad-padding", "padded to a length that is not the bucket's")
    return padded[:end]
