"""The first two bytes of every message: protocol version and type."""

from __future__ import annotations

from enum import IntEnum

from device_sdk.wire.codec.errors import WireError

VERSION = 1


class MessageType(IntEnum):
    """Types of messages outside a session. Types inside one start at ``FIRST_ENVELOPE_TYPE``."""

    DESCRIPTOR = 1
    PRESENCE = 2
    ENROL_REQUEST = 3
    ENROL_ANSWER = 4
    SESSION_OPEN = 5
    SESSION_REPLY = 6
    MANIFEST = 7
    CHUNK = 8


FIRST_ENVELOPE_TYPE = 16


def prefix(message_type: MessageType) -> bytes:
    """The two bytes in front of a message of this type."""
    return bytes((VERSION, message_type))


def check_prefix(message: bytes, message_type: MessageType, least: int, most: int) -> None:
    """Refuse what is not a message of this version and type with ``least`` to ``most`` bytes."""
    if len(message) < least:
        raise WireError("truncated", f"{len(message)} bytes, at least {least} expected")
    if len(message) > most:
        raise WireError("too-large", f"{len(message)} bytes, at most {most} expected")
    if message[0] != VERSION:
        raise WireError("bad-version", f"protocol version {message[0]}, expected {VERSION}")
    if message[1] != message_type:
        raise WireError("bad-type", f"message type {message[1]}, expected {int(message_type)}")
