"""What every message is made of: two bytes in front, a record of typed fields, names.

Version and type come first. A control message's body is a record: a CBOR map with a fixed set of
fields, read one typed field at a time. Names of tasks and cohorts are what operators choose and
every message repeats.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import IntEnum
from functools import lru_cache
from typing import Any

from device_sdk.fields import Fields
from device_sdk.wire.codec import cbor
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
    TASKS = 9
    NO_SESSION = 10
    SUCCESSOR = 11


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


MOST_NAME_BYTES = 64
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")


# Every message repeats the same few names.
@lru_cache(maxsize=256)
def is_name(name: str) -> bool:
    """Whether it may name a task, a cohort or a method; see :func:`require_name`."""
    return _NAME.fullmatch(name) is not None


def require_name(what: str, name: str) -> None:
    """Raises ValueError unless ``name`` is 1 to 64 of a-z, 0-9, '.', '_', '-'.

    It starts and ends with a letter or digit, so it is safe as a level of a topic.
    """
    if not isinstance(name, str) or not is_name(name):
        raise ValueError(
            f"{what} {name!r} is no name; expected 1 to {MOST_NAME_BYTES} of a-z, 0-9, '.', '_' "
            "and '-', starting and ending with a letter or digit"
        )


def read_name(what: str, raw: bytes) -> str:
    """A name received. Raises ``WireError("bad-name")``, without quoting it."""
    try:
        name = raw.decode("ascii")
        require_name(what, name)
    except ValueError:
        raise WireError("bad-name", f"the {what} is not a name") from None
    return name


class Record(Fields):
    """The fields of one control message. Every getter raises ``WireError("bad-field")``.

    A map whose keys are not exactly the expected ones is refused at once (``wrong-fields``), but
    that ``optional`` ones may be left out; ``name in record`` tells. No
    refusal repeats the sender's own names and values: it goes to a log. A number is a float, since
    an integer's encoding is another.
    """

    __slots__ = ()
    numbers = (float,)

    def __init__(
        self, value: cbor.CborValue, fields: Collection[str], optional: Collection[str] = ()
    ) -> None:
        if not isinstance(value, dict):
            raise WireError("wrong-fields", "expected a map of fields")
        if value.keys() - optional != set(fields):
            raise WireError("wrong-fields", f"expected exactly the fields {sorted(fields)}")
        self._values = value

    def __contains__(self, name: str) -> bool:
        """Whether an optional field is there."""
        return name in self._values

    def take(self, key: str, default: Any = None) -> Any:
        """A field's value, whatever it is: for a nested record."""
        return self._values[key]

    def wrong(self, key: str, value: object, expected: str) -> WireError:
        """The refusal of a value."""
        return WireError("bad-field", f"field {key!r} must be {expected}")

    def octets(self, name: str, length: int) -> bytes:
        """A byte string of exactly ``length`` bytes."""
        value = self._values[name]
        if not isinstance(value, bytes) or len(value) != length:
            raise self.wrong(name, value, f"a byte string of {length} bytes")
        return value

    def unsigned(self, name: str, limit: int = 2**64 - 1) -> int:
        """An integer from 0 to ``limit`` inclusive."""
        value = self._values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
            raise self.wrong(name, value, f"an integer from 0 to {limit}")
        return value
