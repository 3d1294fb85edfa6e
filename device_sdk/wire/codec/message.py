"""What every message is made of: two bytes in front, a record of typed fields, names.

Version and type come first. A control message's body is a record: a CBOR map with the fields that
its class declares. Names of tasks and cohorts are what operators choose and every message repeats.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from device_sdk.fields import As, Declared, Misfit, Such, Within, plain, read
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError

VERSION = 1
T = TypeVar("T")


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


NAME_WORDS = "1 to 64 of a-z, 0-9, '.', '_' and '-', starting and ending with a letter or digit"
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
        raise ValueError(f"{what} {name!r} is no name; expected {NAME_WORDS}")


def read_name(what: str, raw: bytes) -> str:
    """A name received. Raises ``WireError("bad-name")``, without quoting it."""
    try:
        name = raw.decode("ascii")
        require_name(what, name)
    except ValueError:
        raise WireError("bad-name", f"the {what} is not a name") from None
    return name


Name = Annotated[str, Such(is_name, NAME_WORDS, "bad-name")]
"""The name of a task, a cohort, a method, a label, a metric or a reason."""
Count = Annotated[int, Within(0, 2**63 - 1)]
"""What the stores' signed integers hold; also Unix seconds."""


class TaskName(NamedTuple):
    """A task, and the cohort of its devices that something is for."""

    task: Name
    cohort: Name


Served = Annotated[tuple[str, str], As(TaskName)]
"""A task and a cohort, as a map of ``task`` and ``cohort``."""


class Record(Declared):
    """A record that travels: canonical CBOR, at most ``MOST_BYTES`` long."""

    __slots__ = ()
    MOST_BYTES: ClassVar[int]


Travels = TypeVar("Travels", bound=Record)


def encode(message: Record) -> bytes:
    """The bytes of a message."""
    return cbor.encode(plain(message))


def decode(kind: type[Travels], data: bytes) -> Travels:
    """The message that is encoded as exactly ``data``.

    Raises ``WireError``: ``too-large``, ``bad-cbor``, ``wrong-fields``, ``bad-field``, or the
    reason that a field's type names. It says which field is wrong and what was expected, and
    repeats neither names nor values of the sender's own: it goes to a log.
    """
    return decode_value(kind, cbor.decode(data, limit_bytes=kind.MOST_BYTES))


def decode_value(kind: type[T], value: cbor.CborValue) -> T:
    """As :func:`decode`, of a record that is a part of something else."""
    try:
        return read(kind, value)
    except Misfit as misfit:
        place = f"field {misfit.place!r}" if misfit.place else kind.__name__
        raise WireError(misfit.reason, f"{place} must be {misfit.expected}") from None
    except ValueError as error:
        raise WireError("bad-field", str(error)) from error
