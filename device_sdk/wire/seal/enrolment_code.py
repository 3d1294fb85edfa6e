"""The code that an operator hands to a device: what it trusts, and its right to enrol.

Base32 of ``root fingerprint 16 | token id 8 | secret 16 | least serial 5 | time 5 | checksum 5``,
numbers little-endian: 55 bytes, 88 characters without base32's own padding, shown as eleven groups
of eight.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from dataclasses import dataclass
from typing import Annotated

from device_sdk.fields import Declared, Length, Within
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.authority import SERIAL_LIMIT
from device_sdk.wire.seal.keys import FINGERPRINT_BYTES, RandomBytes, draw

TOKEN_ID_BYTES = 8
SECRET_BYTES = 16
_NUMBER_BYTES = 5
TIME_LIMIT = 2 ** (8 * _NUMBER_BYTES) - 1
_CHECKSUM_BYTES = 5
_SECRET_AT = FINGERPRINT_BYTES + TOKEN_ID_BYTES
_SERIAL_AT = _SECRET_AT + SECRET_BYTES
_TIME_AT = _SERIAL_AT + _NUMBER_BYTES
_BODY_BYTES = _TIME_AT + _NUMBER_BYTES
_CHARACTERS = (_BODY_BYTES + _CHECKSUM_BYTES) * 8 // 5
_GROUP = 8
# What people type for letters that base32 does not share with the digits.
_MISTAKEN = str.maketrans("018", "OIB")


@dataclass(frozen=True)
class EnrolmentCode(Declared):
    """A single-use right to enrol. Whoever holds it can enrol, so it is shown once."""

    root_fingerprint: Annotated[bytes, Length(FINGERPRINT_BYTES)]
    token_id: Annotated[bytes, Length(TOKEN_ID_BYTES)]
    secret: Annotated[bytes, Length(SECRET_BYTES)]
    least_serial: Annotated[int, Within(0, SERIAL_LIMIT)]
    """Of the descriptor in force when the code was made: no older one is believed."""
    made_unix_seconds: Annotated[int, Within(0, TIME_LIMIT)]
    """What had expired then has expired."""

    def __repr__(self) -> str:
        return f"EnrolmentCode(token_id={self.token_id.hex()}, ...)"

    def to_text(self) -> str:
        """Eleven groups of eight characters, joined by hyphens."""
        body = self.root_fingerprint + self.token_id + self.secret
        for number in (self.least_serial, self.made_unix_seconds):
            body += number.to_bytes(_NUMBER_BYTES, "little")
        text = base64.b32encode(body + _checksum(body)).decode()
        return "-".join(text[at : at + _GROUP] for at in range(0, len(text), _GROUP))


def new_code(
    root_fingerprint: bytes,
    least_serial: int,
    made_unix_seconds: int,
    random_bytes: RandomBytes = os.urandom,
) -> EnrolmentCode:
    """A fresh code under a root and its descriptor of ``least_serial``."""
    token_id = draw(random_bytes, TOKEN_ID_BYTES)
    secret = draw(random_bytes, SECRET_BYTES)
    return EnrolmentCode(root_fingerprint, token_id, secret, least_serial, made_unix_seconds)


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
    body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if not hmac.compare_digest(checksum, _checksum(body)):
        raise WireError("bad-code", "the code's checksum is wrong; compare it with the original")
    return EnrolmentCode(
        body[:FINGERPRINT_BYTES],
        body[FINGERPRINT_BYTES:_SECRET_AT],
        body[_SECRET_AT:_SERIAL_AT],
        int.from_bytes(body[_SERIAL_AT:_TIME_AT], "little"),
        int.from_bytes(body[_TIME_AT:], "little"),
    )


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"tessera/1 enrolment code\x00" + body).digest()[:_CHECKSUM_BYTES]
