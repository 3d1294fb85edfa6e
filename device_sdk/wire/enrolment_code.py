"""The code that an operator hands to a device: base32(root fingerprint, token, secret, checksum).

45 bytes make 72 characters without base32's own padding, shown as twelve groups of six.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from dataclasses import dataclass

from device_sdk.wire.errors import WireError
from device_sdk.wire.keys import FINGERPRINT_BYTES, RandomBytes, draw

TOKEN_ID_BYTES = 8
SECRET_BYTES = 16
_CHECKSUM_BYTES = 5
_BODY_BYTES = FINGERPRINT_BYTES + TOKEN_ID_BYTES + SECRET_BYTES
_CHARACTERS = (_BODY_BYTES + _CHECKSUM_BYTES) * 8 // 5
_GROUP = 6
# What people type for letters that base32 does not share with the digits.
_MISTAKEN = str.maketrans("018", "OIB")


@dataclass(frozen=True)
class EnrolmentCode:
    """A single-use right to enrol. Whoever holds it can enrol, so it is shown once."""

    root_fingerprint: bytes
    token_id: bytes
    secret: bytes

    def __post_init__(self) -> None:
        lengths = (len(self.root_fingerprint), len(self.token_id), len(self.secret))
        if lengths != (FINGERPRINT_BYTES, TOKEN_ID_BYTES, SECRET_BYTES):
            raise ValueError(
                f"an enrolment code is made of {FINGERPRINT_BYTES}, {TOKEN_ID_BYTES} and "
                f"{SECRET_BYTES} bytes, got {lengths}"
            )

    def __repr__(self) -> str:
        return f"EnrolmentCode(token_id={self.token_id.hex()}, ...)"

    def to_text(self) -> str:
        """Twelve groups of six characters, joined by hyphens."""
        body = self.root_fingerprint + self.token_id + self.secret
        text = base64.b32encode(body + _checksum(body)).decode()
        return "-".join(text[at : at + _GROUP] for at in range(0, len(text), _GROUP))


def new_code(root_fingerprint: bytes, random_bytes: RandomBytes = os.urandom) -> EnrolmentCode:
    """A fresh code under a root."""
    token_id = draw(random_bytes, TOKEN_ID_BYTES)
    return EnrolmentCode(root_fingerprint, token_id, draw(random_bytes, SECRET_BYTES))


def parse_code(text: str) -> EnrolmentCode:
    """Read a code as typed: any case; spaces and hyphens anywhere; 0, 1, 8 for O, I, B.

    Raises ``WireError("bad-code")``.
    """
    letters = "".join(text.split()).replace("-", "").upper().translate(_MISTAKEN)
    if len(letters) != _CHARACTERS:
        raise WireError(
            "bad-code", f"an enrolment code has {_CHARACTERS} characters, {len(letters)} were given"
        )
    try:
        raw = base64.b32decode(letters)
    except (binascii.Error, ValueError) as error:  # ValueError: letters outside ASCII
        raise WireError("bad-code", "an enrolment code has only A to Z and 2 to 7") from error
    body, checksum = raw[:_BODY_BYTES], raw[_BODY_BYTES:]
    if not hmac.compare_digest(checksum, _checksum(body)):
        raise WireError("bad-code", "the code's checksum is wrong; compare it with the original")
    return EnrolmentCode(
        body[:FINGERPRINT_BYTES],
        body[FINGERPRINT_BYTES : FINGERPRINT_BYTES + TOKEN_ID_BYTES],
        body[FINGERPRINT_BYTES + TOKEN_ID_BYTES :],
    )


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"tessera/1 enrolment code\x00" + body).digest()[:_CHECKSUM_BYTES]
